"""An algorithm in a user's own folder works with every command, with no edit to the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, TESTS, only_run, read_rows
from warm_python import WarmPython

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("own_algorithm")]

FOLDER = TESTS / "own_algorithm"
SETTINGS = ["agent=reinforce", "n_envs=4", "seed=1", "device=cpu", "logger=none", "vec_env=serial"]


def call(
    python: WarmPython, folder: Path, script: str, *arguments: str, fails: bool = False
) -> str:
    command = ["-m", "ml_pipeline"] if script == "-m" else [str(REPOSITORY / script)]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    codes, output = python.run(*command, *arguments, cwd=folder, environments=[environment])
    assert codes == [int(fails)], output
    return output


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> Path:
    """A user's folder with the algorithm and one trained run."""
    folder = tmp_path_factory.mktemp("own") / "folder"
    shutil.copytree(FOLDER, folder)
    call(python, folder, "train_ppo.py", *SETTINGS, "total_steps=10240")
    return folder


def test_own_algorithm_learns(here: Path) -> None:
    rows = read_rows(only_run(here))

    assert len(rows) == 10240 // (4 * 64)
    assert float(rows[-1]["rollout/episode_return_mean_100"]) > 35.0  # random actions reach 22


def test_own_algorithm_evaluates_exports_and_plays(here: Path, python: WarmPython) -> None:
    run = str(only_run(here).relative_to(here))

    evaluated = call(python, here, "-m", "evaluate", run, "--deterministic", "--episodes", "3")
    exported = call(python, here, "-m", "export", run)
    played = call(python, here, "-m", "play", f"{run}/policy.pt2", "--episodes", "1")

    assert "3 episodes" in evaluated
    assert "1,000 observations" in exported
    assert "seed 0: return" in played


def test_own_algorithm_resumes_and_compares(here: Path, python: WarmPython, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(here, other)
    run = str(only_run(other).relative_to(other))

    resumed = call(python, other, "train_ppo.py", f"resume={run}", "total_steps=10752")
    call(python, other, "train_ppo.py", *SETTINGS, "total_steps=512", "agent.learning_rate=3e-3")
    compared = call(python, other, "-m", "compare", *map(str, other.glob("runs/CartPole-v1/*")))

    assert "resumed at env step 10,240" in resumed
    assert "learning_rate=0.003" in compared


def test_own_algorithm_works_in_a_study(here: Path, python: WarmPython) -> None:
    settings = [*SETTINGS, "total_steps=512", "space=space.yaml", "n_trials=2"]

    call(python, here, "-m", "study", "start", "own", *settings)
    status = call(python, here, "-m", "study", "status", "own")

    assert "2 of 2 trials" in status


def test_wrong_key_of_an_own_algorithm_is_refused_with_its_name(
    python: WarmPython, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)

    error = call(python, tmp_path, "train_ppo.py", *SETTINGS, "+agent.clip_range=0.2", fails=True)

    assert "agent.clip_range=0.2: unknown key; choose from algorithm, " in error
