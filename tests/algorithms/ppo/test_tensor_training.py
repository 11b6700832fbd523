"""Runs with tensor envs: trained, resumed, stopped, refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import only_run, read_rows, small_auto
from stopped_runs import StopAfter, checkpoint_numbers

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.errors import UserError
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.checks import TrainingError

# 4 iterations of 4 envs x 16 steps; EVALUATED after the last one.
EVALUATED = small_auto(n_envs=4, total_steps=256, callbacks__evaluation__eval_every_steps=200)
RUN = [*small_auto(n_envs=4, total_steps=256), "~callbacks.evaluation"]
CARTPOLE = ["env=torch_cartpole", *RUN]

CASES: dict[str, list[str]] = {
    "evaluated": [*EVALUATED, "env=torch_cartpole"],
    "normalised, scaled, adaptive": [
        *CARTPOLE,
        "agent.normalize_obs=true",
        "agent.scale_reward=true",
        "agent.learning_rate_schedule=adaptive",
        "agent.entropy_coef=0.01",
        "agent.entropy_coef_schedule=cosine",
    ],
    "max_kl": [*RUN, "env=torch_acrobot", "agent.max_kl=1e-5", "agent.normalize_obs=true"],
    "box": [*RUN, "env=torch_pendulum", "agent.clip_range_schedule=linear"],
    "squashed": [*RUN, "env=torch_pendulum", "agent.box_policy=squashed"],
    "gsde": [
        *RUN,
        "env=torch_mountain_car_continuous",
        "agent.box_policy=gsde",
        "agent.scale_reward=true",
    ],
    "parts": [*EVALUATED, "env.target=tiny_torch_envs.Steered", "env.id=null"],
    "shared trunk": [*CARTPOLE, "agent.shared_trunk=true"],
    "lstm": [*CARTPOLE, "network=lstm", "agent.normalize_obs=true", "agent.scale_reward=true"],
    "gru in torch": [*CARTPOLE, "network=lstm", "network.cell=gru", "agent.fast=off"],
    "attention": [*EVALUATED, "env=torch_pendulum", "network=trxl", "network.window=4"],
    "masks and mingru": [
        *EVALUATED,
        *("env.target=tiny_torch_envs.ForbiddingTwo", "env.id=null"),
        *("network=lstm", "network.cell=mingru"),
    ],
    "masks": [*EVALUATED, "env.target=tiny_torch_envs.ForbiddingTwo", "env.id=null"],
    "choices": [*EVALUATED, "env.target=tiny_torch_envs.Digits", "env.id=null"],
    "parts with masks": [*RUN, "env.target=tiny_torch_envs.DigitsAndForce", "env.id=null"],
    "leaves": [
        *EVALUATED,
        *("env.target=tiny_torch_envs.Leaves", "env.id=null", "agent.normalize_obs=true"),
    ],
    "images": [*EVALUATED, "experiment=torch_breakout", "env.kwargs.sticky_actions=0.1"],
}
SLOW_CASES = ("squashed", "shared trunk")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] if name in SLOW_CASES else [])
        for name, each in CASES.items()
    ],
)
@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    overrides: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted):
        train(overrides, callbacks={"stop": StopAfter(2)})
    run = only_run(here)
    assert len(read_rows(run)) == 2
    capsys.readouterr()

    train([f"resume={run}"])
    output = capsys.readouterr().out
    whole = train(overrides).run_dir

    assert "4 tensor envs, cpu" in output
    assert "resumed at env step 128 in the middle of its episodes" in output
    rows = read_rows(whole)
    assert [int(row["env_steps"]) for row in rows] == [64, 128, 192, 256]
    assert all(math.isfinite(float(row["loss/value"])) for row in rows)
    assert read_rows(run) == rows
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("torch_cartpole", ["n_envs=2"], "4 envs"),
        ("torch_cartpole", ["+env.kwargs.max_episode_steps=50"], "env's settings have changed"),
        ("torch_cartpole", ["env=cartpole"], "env's settings have changed"),
        ("cartpole", ["env=torch_cartpole"], "env's settings have changed"),
    ],
)
@pytest.mark.slow
def test_a_run_with_another_env_is_resumed_with_new_episodes(
    before: str, after: list[str], reason: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train([f"env={before}", *RUN, "total_steps=128"]).run_dir

    resumed = train([f"resume={run}", "total_steps=256", *after])

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "resumed at" in line]
    assert "resumed at env step 128 with new episodes: " in line
    assert reason in line
    assert resumed.env_steps == 256


def test_evaluation_uses_the_gymnasium_env_with_the_same_arguments(here: Path) -> None:
    run = train(["env=torch_cartpole", *EVALUATED, "+env.kwargs.max_episode_steps=7"]).run_dir

    last = read_rows(run)[-1]
    env = load_agent(run).env
    assert env.spec is not None
    assert env.spec.id == "CartPole-v1"
    assert env.spec.max_episode_steps == 7
    # A pole does not fall within seven steps.
    assert last["rollout/episode_length"] == last["eval/episode_length"] == "7.0"


@pytest.mark.slow
def test_a_run_can_be_exported(here: Path) -> None:
    run = train(["env=torch_pendulum", *RUN, "agent.normalize_obs=true"]).run_dir

    assert main(["export", str(run), "--format", "pt2"]) == 0

    assert (run / "policy.pt2").exists()


AGENTS = {
    "ppo": ["agent.n_steps=16"],
    "pqn": ["agent.n_steps=16"],
    "dqn": ["agent.learning_starts=64", "agent.batch_size=16"],
    "sac": ["agent.learning_starts=64", "agent.batch_size=16"],
}


@pytest.mark.parametrize("task", ["Forbidding", "ForbiddingInObs"])
@pytest.mark.parametrize("agent", list(AGENTS))
def test_no_agent_takes_an_action_that_the_task_forbids(agent: str, task: str, here: Path) -> None:
    settings = ["n_envs=4", "total_steps=512", "device=cpu", "logger=none", f"agent={agent}"]
    target = [f"env.target=tiny_torch_envs.{task}", "env.id=null"]

    run = train([*settings, *AGENTS[agent], *target]).run_dir

    # An episode has 3 to 6 steps with reward 1 each; a forbidden action costs 100.
    rows = read_rows(run)
    returns = [row["rollout/episode_return"] for row in rows if row["rollout/episode_return"]]
    returns += [row["eval/episode_return"] for row in rows if row["eval/episode_return"]]
    assert len(returns) > 1
    assert all(3.0 <= float(each) <= 6.0 for each in returns)


OWN_MODULE = """
from tiny_torch_envs import Drift
class OwnDrift(Drift): ...
"""


def test_a_tensor_env_of_the_working_directory_needs_no_gymnasium_env(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own_tensor_env.py").write_text(OWN_MODULE)
    target = "env.target=own_tensor_env.OwnDrift"

    run = train([target, *EVALUATED, "+env.kwargs.max_episode_steps=5"]).run_dir

    assert run.parent.name == "OwnDrift"
    assert 0.0 < float(read_rows(run)[-1]["eval/episode_length"]) <= 5.0
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert "2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["+env.wrappers.flat._target_=gymnasium.wrappers.FlattenObservation"],
            "env.wrappers; put their work into the env class",
        ),
        (["vec_env=serial"], "vec_env; leave vec_env=auto"),
        (["collector=double"], "collector; leave collector=sync"),
        (["env.target=tiny_torch_envs.Masked"], "agent.action_mask without an action_mask"),
        (["env.target=tiny_torch_envs.OtherLeaves"], "a single_env with another observation"),
        (
            ["env=torch_hockey", "opponent=self_play", "env.target=tiny_torch_envs.MaskedHockey"],
            "opponent with its action_mask",
        ),
        (["compile=graph"], "use compile=auto"),
    ],
)
def test_settings_that_tensor_envs_do_not_support_are_refused_in_one_line(
    overrides: list[str], words: str, here: Path
) -> None:
    with pytest.raises(UserError) as caught:
        train([*CARTPOLE, *overrides])

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(here.glob("runs/*/*"))


def test_callbacks_that_resize_the_env_are_refused(here: Path) -> None:
    with pytest.raises(UserError, match="callbacks=scaling"):
        train([*CARTPOLE, "callbacks=scaling"])


PHASE = "+curriculum={phases: {a: {env: {length: 3}}}}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env=torch_cartpole", "+env.kwargs.sutton_barto_reward=true"], "'sutton_barto_reward'"),
        (["env=torch_hockey", "+env.kwargs.discrete=true"], "argument 'discrete'"),
        (["env=torch_hockey", "env.kwargs.opponent=either"], "opponent='either': unknown"),
        (["env=torch_hockey", "env.kwargs.opponent=either", PHASE], "opponent='either': unknown"),
    ],
)
def test_arguments_that_only_the_single_env_accepts_are_refused_before_a_run_folder_exists(
    overrides: list[str], words: str, here: Path
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train([*RUN, *overrides])

    assert "\n" not in str(caught.value)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("total_steps", "n_envs"), [(64 * 16 * 10, 64), (10**6, 256)])
def test_an_automatic_number_of_envs_fits_the_budget(
    total_steps: int, n_envs: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = ["+callbacks.stop._target_=own_parts.StopAt", "+callbacks.stop.iteration=1"]

    result = train([*CARTPOLE, "n_envs=auto", f"total_steps={total_steps}", *stop])

    assert result.env_steps == n_envs * 16
    output = capsys.readouterr().out
    assert f"{n_envs} tensor envs (n_envs=auto: {n_envs} envs), cpu" in output


def test_a_mask_that_allows_nothing_stops_the_run_with_one_line(here: Path) -> None:
    words = "iteration 1: an action mask of an env allowed no action"
    with pytest.raises(TrainingError, match=words) as caught:
        train(["env.target=tiny_torch_envs.Stuck", *RUN])

    assert "\n" not in str(caught.value)


def test_a_nan_reward_stops_the_run_with_one_line(here: Path) -> None:
    words = r"iteration 1: an env returned an observation or a reward that is not finite"
    with pytest.raises(TrainingError, match=words) as caught:
        train(["env.target=tiny_torch_envs.Breaking", *RUN])

    assert "\n" not in str(caught.value)
    assert not list(only_run(here).glob("checkpoints/*.pt"))
