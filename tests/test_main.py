"""python -m ml_pipeline: evaluate and compare what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small
from tiny_envs import CountingEnv, EndlessEnv

from ml_pipeline.__main__ import main
from ml_pipeline.build import load_agent, train
from ml_pipeline.runs.compare import differing_keys
from ml_pipeline.runs.evaluate import evaluate


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


def test_compare_shows_what_differs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(train([*small(), f"agent.gamma={gamma}"]).run_dir) for gamma in (0.9, 0.99)]
    capsys.readouterr()

    assert main(["compare", *runs, "--plot", "curves.png"]) == 0

    header, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "agent.gamma" in header
    assert "agent.clip_range" not in header
    assert " 0.9 " in first
    assert " 0.99 " in second
    assert (here / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_keys_that_differ_are_found_even_where_one_lacks_them() -> None:
    assert differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == ["b", "c"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "nowhere"], "nowhere is no run folder: there is no such folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(
    here: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1

    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_compare_leaves_out_what_is_no_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/half").mkdir()
    capsys.readouterr()

    assert main(["compare", run, "runs/half"]) == 0

    told = capsys.readouterr()
    assert run in told.out
    assert told.err == "left out: runs/half is no run folder: it has no config.yaml\n"


@pytest.mark.parametrize("name", ["nowhere/curves.png", "curves.nonsense"])
def test_a_picture_that_cannot_be_written_is_one_line(
    run: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", run, "--plot", name]) == 1
    assert f"--plot {name} cannot be written" in capsys.readouterr().err


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
