"""python -m ml_pipeline: evaluate what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small
from tiny_envs import CountingEnv, EndlessEnv

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.build import load_agent, train


@pytest.fixture
def run(here: Path) -> str:
    return str(train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir)


def test_evaluate_prints_mean_std_min_and_max(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()

    assert main(["evaluate", run, "--episodes", "4", "--deterministic"]) == 0

    out = capsys.readouterr().out
    assert "CountingEnv, checkpoint best of env step" in out
    assert "4 episodes" in out
    assert "greedy actions" in out
    assert "mean 60.0  std 0.0  min 60.0  max 60.0" in out


def test_evaluate_repeats_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(train(small()).run_dir)
    outputs = []
    for _ in range(2):
        capsys.readouterr()
        assert main(["evaluate", run, "--checkpoint", "latest"]) == 0
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[1]
    assert "sampled actions" in outputs[0]


def test_each_episode_of_an_evaluation_has_a_seed_of_its_own(run: str) -> None:
    seeds = []

    class Spy(CountingEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    evaluate(load_agent(run).agent, Spy(), n_episodes=3, seed=100, deterministic=True)

    assert seeds == [100, 101, 102]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "nowhere"], "nowhere is not a run folder: it does not exist"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(
    here: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1

    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_an_episode_that_never_ends_is_cut(run: str) -> None:
    agent = load_agent(run).agent

    result = evaluate(
        agent, EndlessEnv(), n_episodes=2, seed=1, deterministic=True, max_episode_steps=50
    )

    assert result.n_cut == 2
    assert result.mean_length == 50


def test_a_run_without_a_checkpoint_says_so(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in Path(run).glob("checkpoints/*.pt"):
        checkpoint.unlink()

    assert main(["evaluate", run]) == 1
    assert "has no checkpoint latest.pt" in capsys.readouterr().err
