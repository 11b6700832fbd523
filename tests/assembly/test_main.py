"""python -m ml_pipeline: the list of commands, their errors, and evaluate."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture, call, error_line, small
from tiny_envs import CountingEnv, EndlessEnv

from ml_pipeline import commands
from ml_pipeline.__main__ import main
from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.assembly.run import load_agent, train


@pytest.fixture
def run(here: Path) -> str:
    return str(train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir)


def test_help_lists_every_command_without_importing_torch_or_hydra() -> None:
    code = """
import sys
from ml_pipeline.__main__ import main
try:
    main(["--help"])
finally:
    print([name for name in ("torch", "hydra", "wandb", "optuna") if name in sys.modules])
"""

    result = call(sys.executable, "-c", code, cwd=REPOSITORY)

    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n[]\n")
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("    ")}
    names = {"compare", "evaluate", "export", "play", "runs", "serve", "study", "train"}
    assert names <= listed


def test_version_is_that_of_the_package(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    assert capsys.readouterr().out == f"ml_pipeline {version('ml_pipeline')}\n"


def test_file_in_the_commands_folder_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "greet.py").write_text(
        "HELP = 'greet someone'\n"
        "def add_arguments(parser): parser.add_argument('name')\n"
        "def run(options): print('hello', options.name)\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])

    assert main(["greet", "world"]) == 0

    assert capsys.readouterr().out == "hello world\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["evaluate", "nowhere"], 1, "nowhere"),
        (["evaluate", "."], 1, "is not a run folder: it has no config.yaml"),
        (["evaluate", "run", "--video", "--render", "human"], 1, "--video and --render"),
        (
            ["train", "resume=nowhere"],
            1,
            "resume=nowhere: nowhere is not a run folder: it does not exist; "
            "python -m ml_pipeline runs lists the runs",
        ),
        (["serve", "file", "--port", "99999"], 2, "--port: must be an integer from 0 to 65535"),
        (["evaluate", "run", "--episodes", "0"], 2, "--episodes: must be an integer of at least 1"),
        (["evalute", "run"], 2, "COMMAND: no evalute; did you mean evaluate?"),
        (["eval", "run"], 2, "COMMAND: no eval; did you mean evaluate?"),
        (["fly", "run"], 2, "invalid choice: 'fly'"),
        (["evaluate", "run", "--render"], 2, "--render: expected one argument, one of human;"),
        (["evaluate", "run", "--n_episodes", "5"], 2, "did you mean --episodes 5?; see python -m "),
        (["evaluate", "run", "episodes=5"], 2, "arguments: episodes=5; did you mean --episodes 5?"),
        (
            ["evaluate", "run", "-x"],
            2,
            "evaluate: unknown arguments: -x; see python -m ml_pipeline",
        ),
        (["runs", "--evn=CartPole-v1"], 2, "did you mean --env CartPole-v1?"),
        (["play", "run", "--episode=3"], 1, "run cannot be read"),  # argparse completes it
        (["study", "statsu", "NAME"], 2, "did you mean status?"),
        ([], 2, "required: COMMAND; see python -m ml_pipeline --help"),
    ],
)
def test_mistake_prints_one_line_and_sets_the_exit_code(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["ml_pipeline/__main__.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    try:
        returned = main(arguments)
    except SystemExit as stop:
        returned = int(stop.code or 0)

    assert returned == code
    assert words in error_line(capsys)


def test_study_offers_only_the_commands_of_its_help(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["study", "x"])

    choices = error_line(capsys).partition("choose from ")[2].partition(")")[0]
    assert choices.replace("'", "") == "start, status, dashboard, best"


def test_evaluate_prints_mean_std_min_and_max(run: str, capsys: Capture) -> None:
    capsys.readouterr()

    assert main(["evaluate", run, "--episodes", "4", "--deterministic"]) == 0

    out = capsys.readouterr().out
    assert "CountingEnv, checkpoint best of env step" in out
    assert "4 episodes" in out
    assert "greedy actions" in out
    assert "mean 60.0  std 0.0  min 60.0  max 60.0" in out


def test_evaluate_gives_the_same_returns_again(finished_run: Path, capsys: Capture) -> None:
    outputs = []
    for _ in range(2):
        arguments = ["--checkpoint", "latest", "--episodes", "5"]
        assert main(["evaluate", str(finished_run), *arguments]) == 0
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[1]
    assert "sampled actions" in outputs[0]


def test_every_episode_of_an_evaluation_has_its_own_seed(run: str) -> None:
    seeds = []

    class Spy(CountingEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    evaluate(load_agent(run).agent, Spy(), n_episodes=3, seed=100, deterministic=True)

    assert seeds == [100, 101, 102]


def test_endless_episode_is_cut(run: str) -> None:
    agent = load_agent(run).agent

    result = evaluate(
        agent, EndlessEnv(), n_episodes=2, seed=1, deterministic=True, max_episode_steps=50
    )

    assert result.n_cut == 2
    assert result.mean_length == 50


def test_missing_checkpoint_is_named(finished_run: Path, capsys: Capture) -> None:
    for name in ("best", "latest"):
        (finished_run / "checkpoints" / f"{name}.pt").unlink()
        assert main(["evaluate", str(finished_run), "--checkpoint", name]) == 1
        assert f"has no checkpoint {name}; it has" in error_line(capsys)
    assert main(["evaluate", str(finished_run)]) == 1
    assert "has no checkpoint latest; it has none, so train it again" in error_line(capsys)
