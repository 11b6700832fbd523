"""build.train: the record of a run, its seed, mistakes in the config, and resuming."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    REPOSITORY,
    Capture,
    contents,
    only_run,
    read_rows,
    small,
    small_auto,
    summary_of,
)

from ml_pipeline.assembly.agent import build_agent
from ml_pipeline.assembly.build import cpu_context
from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.run import train
from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.contracts import Callback


def test_run_writes_its_record_and_no_other_files(here: Path) -> None:
    settings = small_auto()

    result = train(settings)

    assert result.run_dir == only_run(here).relative_to(here)
    assert re.fullmatch(
        r"runs/CartPole-v1/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}", str(result.run_dir)
    )
    assert (result.env_steps, len(read_rows(result.run_dir))) == (64, 2)
    assert result.agent.act_batch(np.zeros((1, 4)), deterministic=True).shape == (1,)
    names = {path.name for path in result.run_dir.iterdir()} - {"changes.diff"}
    assert names == {"checkpoints", "config.yaml", "metrics.csv", "summary.json"}
    kept = {path.name for path in (result.run_dir / "checkpoints").iterdir()}
    (envs,) = kept - {"best.pt", "latest.pt"}
    assert re.fullmatch(r"[0-9a-f]{32}\.envs", envs)
    assert [path.name for path in here.iterdir()] == ["runs"]
    summary = summary_of(result.run_dir)
    assert summary["status"] == "finished"
    assert summary["mean_reward"] == result.mean_reward == result.objective
    assert summary["versions"]["torch"]
    assert summary["commands"] == [f"train({settings})"]
    head = subprocess.run(
        ["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert (summary["git_commit"] or "").rstrip("+") == head.stdout.strip()


@pytest.mark.parametrize(("shape", "is_told"), [((8, 8, 1), True), ((8, 8), False)])
def test_an_mlp_that_reads_images_is_told_once(
    here: Path, capsys: Capture, shape: tuple[int, ...], is_told: bool
) -> None:
    env = ["env.id=null", "env.target=tiny_envs.FramesEnv", f"+env.kwargs.shape={list(shape)}"]

    train([*small(), *env, "~callbacks.evaluation", "network=mlp"])

    line = "network=mlp: the observation is an image of shape (8, 8, 1); try network=cnn"
    assert capsys.readouterr().out.count(line) == is_told


def test_one_env_starts_no_process(here: Path, capsys: Capture) -> None:
    count = "+callbacks.count={_target_: own_parts.CountChildren}"

    train([*small_auto(n_envs=1, agent__n_steps=32), count])
    forked = ["vec_env=parallel", "vec_env.n_workers=2", "vec_env.start_method=fork"]
    train([*small(), *forked, count])

    # The evaluation before the second count has workers of its own.
    assert (here / "children").read_text().split() == ["0", "0", "2", "4"]
    assert capsys.readouterr().out.startswith("CartPole-v1: 1 env in this process")


@pytest.mark.parametrize("preset", ["pendulum", "acrobot", "mountain_car_continuous"])
def test_preset_trains(here: Path, preset: str) -> None:
    assert train([*small(), f"env={preset}", "~callbacks.evaluation"]).env_steps == 64


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["lunar_lander", "half_cheetah", "hopper", "walker2d"])
def test_preset_of_an_extra_trains(here: Path, preset: str) -> None:
    package = "Box2D" if preset == "lunar_lander" else "mujoco"
    pytest.importorskip(package, reason=f"make {package.lower()} installs it; .ci/run does")

    assert train([*small(), f"env={preset}", "~callbacks.evaluation"]).env_steps == 64


def test_metrics_depend_only_on_the_seed_for_every_vec_env(here: Path) -> None:
    settings = small(n_envs=8, total_steps=512, callbacks__evaluation__eval_every_steps=200)
    ways = [
        ["vec_env=serial"],
        ["vec_env=parallel", "vec_env.n_workers=1", "vec_env.start_method=spawn"],
        ["vec_env=parallel", "vec_env.n_workers=2", "vec_env.start_method=fork"],
        ["vec_env=shared", "vec_env.start_method=fork"],
    ]

    records = [read_rows(train([*settings, *way]).run_dir) for way in ways]

    assert len(records[0]) == 4
    assert records[1:] == records[:1] * 3
    assert read_rows(train([*settings, "vec_env=serial", "seed=2"]).run_dir) != records[0]


def test_first_weights_do_not_depend_on_the_number_of_threads() -> None:
    config, before = checked_config(compose_config(small())), torch.get_num_threads()
    env, weights = gym.make("CartPole-v1"), []
    env_spaces = Spaces(env.observation_space, env.action_space)
    try:
        for n_threads in (1, 2, 4):
            torch.set_num_threads(n_threads)
            weights.append(build_agent(config, env_spaces, cpu_context(config)).adam.values)
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)

    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


class CountThreads(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_iteration_end(self, loop: Any, metrics: Any) -> None:
        self.seen.append(torch.get_num_threads())


def test_convolutions_use_all_cores_also_when_resumed_on_fewer(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = ["env.id=null", "env.target=tiny_envs.FramesEnv", "+env.kwargs.shape=[8,8]"]
    cnn = ["network=cnn", "network.channels=[4]", "network.kernels=[3]", "network.strides=[2]"]
    fork = ["vec_env=parallel", "vec_env.start_method=fork"]  # not safe with threads
    count, before = CountThreads(), torch.get_num_threads()
    monkeypatch.setattr("ml_pipeline.assembly.plan.available_cores", lambda: 3)
    torch.set_num_threads(3)
    try:
        run = train([*small(), *frames, *cnn], callbacks={"count": count}).run_dir
        train([*small(), *frames, "network=mlp"], callbacks={"count": count})
        train([*small(), *frames, *cnn, *fork], callbacks={"count": count})
        torch.set_num_threads(1)
        train([f"resume={run}", "total_steps=96"], callbacks={"count": count})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)

    assert count.seen == [3, 3, 1, 1, 1, 1, 3]
    out = capsys.readouterr().out
    assert out.count("cpu with 3 threads") == 4  # two runs, at their start and at their end


def test_threads_beside_forked_workers_are_remarked_on(here: Path, capsys: Capture) -> None:
    forked = ["vec_env=parallel", "vec_env.n_workers=1", "vec_env.start_method=fork"]

    train([*small(), *forked, "cpu_threads=2"])
    assert (
        "cpu_threads=2 with vec_env.start_method=fork: forked workers hang if"
        in capsys.readouterr().out
    )

    train([*small(), *forked, "cpu_threads=1"])
    assert "cpu_threads" not in capsys.readouterr().out


def own_network(name: str) -> list[str]:
    return ["network=own", f"network._target_=own_parts.{name}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["env.id=CartPol-v1"], "did you mean CartPole-v1"),
        (["resume=."], "config.yaml"),
        (["device=cuda:9"], "device=cuda:9"),
        pytest.param(
            ["device=mps"],
            "this torch has no MPS; use device=cpu",
            marks=pytest.mark.skipif(sys.platform == "darwin", reason="may have MPS"),
        ),
        (["env.target=tiny_envs.WordsEnv"], "Text"),
        pytest.param(
            ["env.id=ALE/Pong-v5"],
            "[atari]",
            marks=pytest.mark.skipif(bool(find_spec("ale_py")), reason="it is installed here"),
        ),
        (["+env.kwargs.speed=9"], "env.id=CartPole-v1"),
        (["callbacks.evaluation.n_episodes=0"], "callbacks.evaluation.n_episodes"),
        (["callbacks.checkpoints.every_steps=often"], "callbacks.checkpoints.every_steps"),
        (["logger=wandb", "logger.wandb.mode=loud"], "logger.wandb.mode"),
        (["network.hidden_sizes=[]"], "network.hidden_sizes"),
        (["network.hidden_sizes=64"], "network.hidden_sizes"),
        (["env.target=own_broken.Env"], "env.target=own_broken.Env: ZeroDivisionError in own_brok"),
        (["env.target=own_lacking.Env"], "own_lacking needs no_such_package, which is not"),
        (["env.target=own_parts.OldApi"], "env OldApi failed in its trial before training"),
        (["env.target=own_parts.LateMask"], "returns an action_mask from step, but not from"),
        (["env.target=own_parts.NoInfo"], "TypeError: info must be a dict, got None"),
        (["+callbacks.x={_target_: own_parts.Anything}"], "callbacks.x: Anything is not"),
        (
            ["+callbacks.x={_target_: own_parts.OddState}"],
            "the state of callbacks.x['best'][0]: a checkpoint cannot contain a numpy.float64",
        ),
        (["+logger.x={_target_: own_parts.Anything}"], "logger.x: Anything has no log"),
        (own_network("Lazy"), "network Lazy has lazy layers"),
        (own_network("Failing"), "network: RuntimeError: out of luck"),
        (own_network("WrongSize"), "network WrongSize has out_features="),
        (own_network("Flat"), "network Flat: forward returned features of shape (8,) for a batch"),
        (own_network("Pair"), "network Pair: forward returned a tuple; return one tensor"),
        (
            own_network("InPlace"),
            "network InPlace: the gradient of forward fails: RuntimeError: one",
        ),
        (own_network("Failing"), "own_parts.py:"),  # its line
        (own_network("Logarithm"), "network Logarithm: forward returned nan (own_parts.py:"),
        (["env.target=own_parts.Spaceless"], "Spaceless has no observation_space; set self.obs"),
        (
            ["+env.wrappers.x={_target_: own_parts.Lost}"],
            "env.wrappers.x: Lost.__init__ must call super().__init__(env)",
        ),
        (own_network("OneAtATime"), "network cannot process an observation of shape (4,)"),
    ],
)
def test_mistake_is_found_before_anything_is_created(
    here: Path, arguments: list[str], words: str
) -> None:
    (here / "own_broken.py").write_text("1 / 0\n")
    (here / "own_lacking.py").write_text("import no_such_package\n")
    before = multiprocessing.active_children()

    with pytest.raises(UserError, match=re.escape(words)):
        train([*small(), "vec_env=shared", *arguments])

    assert not list(here.glob("runs/*/*"))
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.parametrize(("name", "is_said"), [("Detached", True), ("Wide", False)])
def test_network_without_a_gradient_is_said(
    here: Path, capsys: Capture, name: str, is_said: bool
) -> None:
    train([*small(), *own_network(name)])

    line = f"network {name}: its features have no gradient, so training does not change it"
    assert (line in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("fault", "mode", "words"),
    [("raise", "parallel", "LookupError: puck left the table"), ("sys.exit", "serial", "Exit: 3")],
)
def test_crashing_env_ends_the_run_with_its_traceback_and_marks_it_failed(
    here: Path, fault: str, mode: str, words: str
) -> None:
    crash = ["env.target=tiny_envs.FaultyEnv", f"+env.kwargs={{fault: {fault}, culprit: 2}}"]

    with pytest.raises(UserError, match=rf"env 1 \(seed 2\) raised:[\s\S]*{words}"):
        train([*small(), *crash, f"vec_env={mode}", "env_seeds=adjacent"])

    assert summary_of(only_run(here))["status"] == "failed"


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_network_that_returns_infinity_in_the_run_is_named(here: Path, agent: str) -> None:
    steps = [] if agent == "ppo" else ["agent.learning_starts=8", "agent.batch_size=4"]
    words = [each for each in small() if not each.startswith("agent.")] if steps else small()
    place = r"network LateInfinity: forward returned inf \(own_parts.py:\d+ in forward\)"

    with pytest.raises(UserError, match=rf"^iteration \d+: .*{place}; look there first$"):
        train([*words, f"agent={agent}", *steps, *own_network("LateInfinity"), "total_steps=4096"])


def test_run_without_an_ended_episode_says_so(here: Path, capsys: Capture) -> None:
    train([*small(), "env.target=tiny_envs.EndlessEnv", "~callbacks.evaluation"])

    printed = capsys.readouterr().out
    assert "no episode of the training has ended, so it has no return; raise total_steps" in printed
    assert "was never measured" not in printed


def test_nan_weights_never_reach_a_checkpoint(here: Path) -> None:
    settings = [*small(), "env.target=tiny_envs.NanEnv", "~callbacks.evaluation"]

    with pytest.raises(UserError, match=r"env 0.*nan"):
        train([*settings, "callbacks.checkpoints.every_steps=1"])

    state = load_checkpoint(RunFolder.open(only_run(here)), "latest")
    assert state["iteration"] == 1
    assert all(value.isfinite().all() for value in state["agent"]["model"].values())


def test_resume_keeps_the_config_except_for_the_keys_on_the_command_line(here: Path) -> None:
    first = train(
        [*small(), "agent.gamma=0.9", "env=pendulum", "callbacks.evaluation.n_episodes=1"]
    )
    text = (first.run_dir / "config.yaml").read_text()

    second = train([f"resume={first.run_dir}", "total_steps=128", "agent.clip_range=0.1"])

    assert second.run_dir == first.run_dir
    assert second.env_steps == 128
    expected = text.replace("total_steps: 64", "total_steps: 128")
    expected = expected.replace("clip_range: 0.2", "clip_range: 0.1")
    written = (first.run_dir / "config.yaml").read_text()
    assert written.splitlines()[:-1] == expected.splitlines()[:-1]  # the last line is a signature
    iterations = [int(row["iteration"]) for row in read_rows(first.run_dir)]
    assert iterations == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("first", "then", "expected", "unexpected"),
    [
        ([], ["vec_env=auto", "~callbacks.evaluation"], "mode: auto", "evaluation:"),
        (["num_episodes=1"], [], "num_episodes: null", "num_episodes: 1"),
        ([], ["logger.wandb.mode=disabled"], "loggers.WandbLogger", "logger: {}"),
    ],
    ids=["groups", "steps instead of episodes", "wandb"],
)
def test_resume_can_replace_add_and_drop_parts_of_the_config(
    here: Path, first: list[str], then: list[str], expected: str, unexpected: str
) -> None:
    run = train([*small(), *first]).run_dir

    assert train([f"resume={run}", "total_steps=96", *then]).env_steps == 96

    text = (run / "config.yaml").read_text()
    assert expected in text
    assert unexpected not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "64 of 64"),
        (["experiment=cartpole"], "experiment="),
        (["total_steps=96", "env=acrobot"], "does not fit"),
    ],
)
def test_impossible_resume_is_refused_and_changes_no_file(
    finished_run: Path, arguments: list[str], words: str
) -> None:
    before = contents(finished_run)

    with pytest.raises(UserError, match=words):
        train([f"resume={finished_run}", *arguments])

    assert contents(finished_run) == before


def test_resume_of_a_run_without_a_checkpoint_or_config_names_the_key(finished_run: Path) -> None:
    for lost, fact in (
        ("checkpoints/latest.pt", "has no checkpoint"),
        ("config.yaml", "no config"),
    ):
        (finished_run / lost).unlink()

        with pytest.raises(UserError, match=f"^resume={finished_run}: .*{fact}"):
            train([f"resume={finished_run}", "total_steps=96"])


def test_resumed_run_that_stops_at_once_keeps_its_metrics(finished_run: Path) -> None:
    before = summary_of(finished_run)
    stop = "+callbacks.stop={_target_: stopped_runs.StopAfter, n_iterations: 0}"

    with pytest.raises(KeyboardInterrupt):
        train([f"resume={finished_run}", "total_steps=96", stop])

    after = summary_of(finished_run)
    assert after["env_steps"] == before["env_steps"] == 64
    assert after["metrics"] == before["metrics"]
    assert len(after["commands"]) == 2
