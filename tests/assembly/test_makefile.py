"""make: arguments and variables reach training, and a second call installs nothing."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, call, read_rows, small

from ml_pipeline.assembly.run import train

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The make that runs these tests must not pass its own variables on.
    return call("make", "-C", REPOSITORY, *arguments, MAKEFLAGS="", ARGS="")


def test_arguments_reach_training(tmp_path: Path) -> None:
    result = make("-n", "train", f"VENV={tmp_path}", "ARGS=n_envs=8 seed=3")

    assert f"{tmp_path}/bin/python train_ppo.py n_envs=8 seed=3" in result.stdout
    assert "-m pip install" in result.stdout


def test_nothing_is_installed_if_the_stamp_is_newer_than_the_project_file(tmp_path: Path) -> None:
    for stamp in (".installed", ".installed-dev"):
        (tmp_path / stamp).touch()

    result = make("-n", "train", "test", f"VENV={tmp_path}")

    assert "pip install" not in result.stdout
    assert "train_ppo.py" in result.stdout


def test_old_python_is_refused_in_one_line_before_anything_is_created(
    tmp_path: Path, old_python: str
) -> None:
    result = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old_python}")

    assert result.returncode != 0
    assert "ml_pipeline needs Python 3.10 or newer, this is 3." in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder that make takes for an installed environment; it runs this Python."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for stamp in (".installed", ".installed-dev"):
        (folder / stamp).touch()
    return folder


VARIABLES = {
    "TRAIN_ENVS": "4",
    "TRAIN_STEPS": "50000",
    "TRAIN_EPISODE_LENGTH": "1000",
    "TRAIN_UPDATE_EPOCHS": "8",
    "TRAIN_BATCH_SIZE": "256",
    "TRAIN_OUTPUT_DIR": "some where",
    "TRAIN_ENV": "game_boy",
    "TRAIN_ROM": "game.gb",
    "TRAIN_GAME": "game.yaml",
}


def test_variables_become_overrides(venv: Path) -> None:
    python = venv / "bin" / "python"
    script = python.read_text().replace("exec", '[ "$1" != -c ] && printf "%s|" "$@" && exit\nexec')
    python.write_text(script)

    result = make("train", f"VENV={venv}", *(f"{key}={value}" for key, value in VARIABLES.items()))

    assert result.stdout[result.stdout.index("train_ppo.py|") :].split("|")[1:11] == [
        *("env=game_boy", "n_envs=4", "total_steps=50000", "env.kwargs.episode_length=1000"),
        *("agent.n_epochs=8", "agent.n_steps=128", "agent.n_minibatches=2", "run_root=some where"),
        *("env.kwargs.rom=game.gb", "env.kwargs.game=game.yaml"),
    ]


def test_a_rom_chooses_the_env(venv: Path) -> None:
    result = make("-n", "train", f"VENV={venv}", "TRAIN_ROM=game.gb")

    assert 'train_ppo.py "env=game_boy" "env.kwargs.rom=game.gb"' in result.stdout


LIMIT = ("gymnasium.wrappers.TimeLimit", "max_episode_steps=40")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("acrobot", ["+env.kwargs.max_episode_steps=40"]),
        ("torch_cartpole", ["+env.kwargs.max_episode_steps=40"]),
        ("game_boy", ["env.kwargs.episode_length=40"]),
        ("trading", ["env.kwargs.episode_bars=40"]),
        ("torch_trading", ["env.kwargs.episode_bars=40"]),
        *(
            (env, [f"+env.wrappers.limit.{each}" for each in (f"_target_={LIMIT[0]}", LIMIT[1])])
            for env in ("hockey", "real_hockey", "camera_and_flag")
        ),
    ],
)
def test_episode_length_has_the_key_of_each_env(venv: Path, env: str, words: list[str]) -> None:
    result = make("-n", "train", f"VENV={venv}", f"TRAIN_ENV={env}", "TRAIN_EPISODE_LENGTH=40")

    quoted = " ".join(f'"{each}"' for each in words)
    assert f'train_ppo.py "env={env}" {quoted}\n' in result.stdout


@pytest.mark.parametrize("env", ["hockey", "trading"])
def test_episode_length_limits_episodes_of_a_world(env: str, venv: Path, here: Path) -> None:
    shown = make(
        "-n", "train", f"VENV={venv}", f"TRAIN_ENV={env}", "TRAIN_EPISODE_LENGTH=40"
    ).stdout
    (line,) = (each for each in shown.splitlines() if "train_ppo.py" in each)
    overrides = shlex.split(line)[2:]

    run = train([*overrides, *small(total_steps=192)]).run_dir

    rows = read_rows(run)
    assert max(float(row["rollout/episode_length"] or 0) for row in rows) == 40.0


def test_fixed_episode_length_is_refused(venv: Path) -> None:
    result = make(
        "-n", "train", f"VENV={venv}", "TRAIN_ENV=torch_hockey", "TRAIN_EPISODE_LENGTH=40"
    )

    assert "TRAIN_EPISODE_LENGTH=40: the length of a game of torch_hockey is fixed" in result.stderr


@pytest.mark.parametrize("typo", ["TRAIN_STEP=5", "TRAINSTEPS=5", "train_steps=5", "ARG=seed=3"])
@pytest.mark.parametrize("target", ["train", "train-parallel", "train-20k", "train-pure-rl"])
def test_misspelt_variable_is_refused(typo: str, target: str, venv: Path) -> None:
    result = make("-n", target, f"VENV={venv}", typo)

    assert result.returncode != 0
    assert "train_ppo.py" not in result.stdout
    assert f"{typo}: make has no such variable; choose from PYTHON VENV ARGS" in result.stderr


def test_misspelt_variable_of_the_environment_is_refused(venv: Path) -> None:
    words = "-C", REPOSITORY, "-n", "train", f"VENV={venv}"

    result = call("make", *words, MAKEFLAGS="", ARGS="", TRAIN_STEP="5")

    assert "TRAIN_STEP=5: make has no such variable" in result.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("train", "train_ppo.py seed=3"),
        ("train-pure-rl", "train_ppo.py seed=3"),
        ("train-pure-rl TRAIN_ENV=hockey", '"env=hockey" "~env.wrappers.shaping" seed=3'),
        ("train-parallel", "train_ppo.py vec_env=parallel seed=3"),
        ("train-20k", 'train_ppo.py "n_envs=2" "total_steps=20000" seed=3'),
    ],
)
def test_targets_without_variables(venv: Path, target: str, words: str) -> None:
    result = make("-n", *target.split(), f"VENV={venv}", "ARGS=seed=3")

    assert words in result.stdout


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("TRAIN_ENVS=zero", "n_envs"),
        ("TRAIN_STEPS=0", "must be an integer of at least 1"),
        ("TRAIN_ENV=nothing", "env=nothing"),
    ],
)
@pytest.mark.slow
def test_a_wrong_value_is_refused_by_the_door(venv: Path, variable: str, message: str) -> None:
    result = make("train", f"VENV={venv}", variable)

    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode != 0
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("size", ["300", "many", "0", "-64", "2048"])
def test_wrong_batch_size_is_refused_by_the_name_of_its_variable(venv: Path, size: str) -> None:
    result = make("train", f"VENV={venv}", "TRAIN_ENVS=4", f"TRAIN_BATCH_SIZE={size}")

    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode != 0
    assert lines == [
        f"TRAIN_BATCH_SIZE={size}: must divide a rollout of 128 x TRAIN_ENVS=4 transitions; "
        "use a power of two up to 128"
    ]


def test_help_names_every_target_and_variable() -> None:
    shown = make("help").stdout
    makefile = (REPOSITORY / "Makefile").read_text()

    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    assert [each for each in targets if not re.search(rf"^{each}\s", shown, re.MULTILINE)] == []
    variables = re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)
    assert [each for each in variables if each not in shown] == []


@pytest.mark.slow
def test_the_scaling_benchmark_skips_unknown_envs_and_prints_settings(
    venv: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "scaling.png"
    short = f"--n-envs 1 2 --modes serial --seconds 0.05 --rounds 1 --picture {picture}"

    result = make("bench-scaling", f"VENV={venv}", f"ARGS=--envs nothing game_boy {short}")

    assert "skipped nothing: env=nothing" in result.stdout
    assert re.search(r"^game_boy: env=game_boy n_envs=\d vec_env=serial ", result.stdout, re.M)
    assert picture.stat().st_size > 1000
