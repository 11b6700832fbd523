"""The door, as its users meet it: runs, sweeps, signals, resume, and answers to bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    REPOSITORY,
    TESTS,
    Door,
    door_command,
    old_python,
    only_run,
    read_rows,
    small,
    wait_until,
    wait_until_gone,
)

from ml_pipeline.build import ConfigError, build_agent, checked_config, compose_config, train
from ml_pipeline.envs.vec_env import WorkerError
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError
from ml_pipeline.training.collector import BadValueError


@pytest.fixture
def started(here: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``started("n_envs=2")`` runs train_ppo.py in the background; ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = door_command(*arguments)
        # A group of its own, so that signals can be sent to all of it.
        process = subprocess.Popen(command, cwd=here, text=True, start_new_session=True, **pipes)
        processes.append(process)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def await_progress(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("env steps"):
            return
    raise AssertionError("no progress was shown")


def children_of(pid: int) -> list[int]:
    if not Path("/proc").exists():
        pytest.skip("finds processes in /proc")
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended in the meantime
            continue
        if fields[1] == str(pid):
            children.append(int(stat.parent.name))
    return children


def test_a_run_leaves_the_record_it_promises_and_nothing_else(here: Path) -> None:
    result = train(small(logger="none"))

    assert result.run_dir == only_run(here).relative_to(here)
    assert re.fullmatch(
        r"runs/CartPole-v1/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}", str(result.run_dir)
    )
    assert (result.env_steps, len(read_rows(result.run_dir))) == (64, 2)
    names = {path.name for path in result.run_dir.iterdir()}
    assert sorted(names - {"changes.diff"}) == [  # which is there while one works on the code
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "summary.json",
    ]
    kept = [path.name for path in (result.run_dir / "checkpoints").iterdir()]
    assert sorted(name for name in kept if name.endswith(".pt")) == ["best.pt", "latest.pt"]
    (envs,) = [name for name in kept if not name.endswith(".pt")]
    assert re.fullmatch(r"[0-9a-f]{16}\.envs", envs)  # where a resume lets the envs go on
    assert [path.name for path in here.iterdir()] == ["runs"]
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["mean_reward"] == result.mean_reward == result.objective
    assert summary["versions"]["torch"]
    assert summary["commands"] == [f"train({small(logger='none')})"]
    head = subprocess.run(
        ["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert (summary["git_commit"] or "").rstrip("+") == head.stdout.strip()


@pytest.mark.slow
def test_the_start_says_what_runs_where_and_the_end_how_to_go_on(door: Door, here: Path) -> None:
    result = door(*small(), "vec_env=parallel", "vec_env.n_workers=2")

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "CartPole-v1: 2 envs, 2 spawn workers, cpu"
    run = only_run(here).relative_to(here)
    assert f"run folder: {run}" in lines
    for word in ("env steps 64/64", "ETA", "iteration 2", "mean(100)", "episodes", "steps/s"):
        assert word in result.stdout
    commands = dict(
        line.split(": ", 1) for line in lines if re.match(r"evaluate|resume|compare", line)
    )
    assert sorted(commands) == ["compare", "evaluate", "resume"]
    for command in commands.values():
        after = subprocess.run(command, shell=True, cwd=here, capture_output=True, text=True)
        assert after.returncode == 0, after.stderr


def test_one_env_starts_no_process(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = "+callbacks.count={_target_: own_parts.CountChildren}"

    train([*small(n_envs=1, agent__n_steps=32), count])
    train([*small(), "vec_env=parallel", "vec_env.n_workers=2", count])

    assert (here / "children").read_text().split() == ["0", "0", "2", "2"]
    assert capsys.readouterr().out.startswith("CartPole-v1: 1 env in this process")


@pytest.mark.parametrize("override", ["env=pendulum", "env=acrobot", "env=mountain_car_continuous"])
def test_presets_train(here: Path, override: str) -> None:
    assert train([*small(), override, "~callbacks.evaluation"]).env_steps == 64


@pytest.mark.parametrize("preset", ["lunar_lander", "half_cheetah", "hopper", "walker2d"])
def test_presets_that_need_an_extra_train(here: Path, preset: str) -> None:
    package = "Box2D" if preset == "lunar_lander" else "mujoco"
    pytest.importorskip(package, reason=f"make {package.lower()} installs it; .ci/run does")

    assert train([*small(), f"env={preset}", "~callbacks.evaluation"]).env_steps == 64


def test_the_seed_alone_decides_the_metrics_whatever_the_workers(here: Path) -> None:
    settings = small(n_envs=8, total_steps=512, callbacks__evaluation__eval_every_steps=200)
    ways = [
        ["vec_env=serial"],
        *(
            ["vec_env=parallel", f"vec_env.n_workers={n}", f"vec_env.start_method={method}"]
            for n in (1, 2)
            for method in ("spawn", "fork")
        ),
        ["vec_env=shared"],
    ]

    records = [read_rows(train([*settings, *way]).run_dir) for way in ways]

    assert len(records[0]) == 4
    assert records[1:] == records[:1] * 5
    assert read_rows(train([*settings, "seed=2"]).run_dir) != records[0]


def test_the_first_weights_do_not_depend_on_the_number_of_cores() -> None:
    config, before = checked_config(compose_config(small())), torch.get_num_threads()
    env, weights = gym.make("CartPole-v1"), []
    try:
        for n_threads in (1, 2, 4):
            torch.set_num_threads(n_threads)
            weights.append(build_agent(config, env, torch.device("cpu")).adam.values)
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)

    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_a_users_own_class_is_found_where_the_command_is_typed(door: Door, here: Path) -> None:
    (here / "my_module.py").write_text(
        "from tiny_envs import CountingEnv\nclass MyEnv(CountingEnv):\n    pass\n"
    )

    result = door(
        *small(),
        "env.target=my_module.MyEnv",
        "+env.kwargs.length=4",
        "vec_env=parallel",
        PYTHONPATH=str(TESTS),
    )

    assert result.returncode == 0, result.stderr
    assert only_run(here).parent.name == "MyEnv"
    assert read_rows(only_run(here))[-1]["rollout/episode_return"] == "100.0"  # 10 + 20 + 30 + 40


def test_a_users_own_yaml_plugs_in_from_outside(door: Door, here: Path) -> None:
    (here / "my_conf" / "env").mkdir(parents=True)
    (here / "my_conf" / "env" / "mine.yaml").write_text(
        """
id: null
target: tiny_envs.CountingEnv
kwargs: {length: 4}
wrappers:
  scale: {_target_: tiny_envs.scale_reward, factor: 2.0}
"""
    )

    result = door("--config-dir", "my_conf", *small(), "env=mine", PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr
    assert read_rows(only_run(here))[-1]["rollout/episode_return"] == "200.0"


def test_networks_and_callbacks_of_the_users_own_by_dotted_path(door: Door, here: Path) -> None:
    for group, text in [
        ("network", "{_target_: own_parts.Wide, width: 5}"),
        ("callbacks", "{stop: {_target_: own_parts.StopAt, iteration: 1}}"),
    ]:
        (here / "my_conf" / group).mkdir(parents=True)
        (here / "my_conf" / group / "mine.yaml").write_text(text)
    settings = [word for word in small() if not word.startswith("callbacks")]
    mine = ["network=mine", "callbacks=mine"]

    result = door("--config-dir", "my_conf", *settings, *mine, PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr
    assert "iteration 1 at env step 32 of 64" in result.stdout
    assert "width: 5" in (only_run(here) / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("agent.gamme=0.9", "full_key: agent.gamme"),
        ("n_envs=many", "n_envs must be auto, or at least 1, got many"),
        ("env.id=CartPol-v1", "did you mean CartPole-v1"),
        ("resume=nowhere", "nowhere is not a run folder"),
    ],
)
def test_bad_input_gets_a_clear_answer_and_exit_code_1(
    door: Door, here: Path, argument: str, words: str
) -> None:
    result = door("vec_env=parallel", argument)

    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) < 12
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["device=cuda:9"], "device=cuda:9: "),
        (["agent.gamma=2"], "agent.gamma must be between 0 and 1, got 2.0"),
        (["agent.n_minibatches=7"], "agent.n_minibatches=7"),
        (["env.target=tiny_envs.WordsEnv"], "space Text"),
        pytest.param(
            ["env.id=ALE/Pong-v5"],
            'pip install "ml_pipeline[atari]"',
            marks=pytest.mark.skipif(bool(find_spec("ale_py")), reason="it is installed here"),
        ),
        (["+env.kwargs.speed=9"], "env.id=CartPole-v1 with env.kwargs {'speed': 9} cannot be"),
        (["callbacks.evaluation.n_episodes=0"], "callbacks.evaluation.n_episodes must be"),
        (["callbacks.checkpoints.every_steps=often"], "callbacks.checkpoints.every_steps must be"),
        (["logger=wandb", "logger.wandb.mode=loud"], "logger.wandb.mode must be auto"),
        (["network.hidden_sizes=[]"], "network.hidden_sizes must be"),
        (["network.hidden_sizes=64"], "network.hidden_sizes must be"),
    ],
)
def test_a_mistake_is_found_before_anything_is_made(
    here: Path, arguments: list[str], words: str
) -> None:
    before = multiprocessing.active_children()

    with pytest.raises(UserError, match=re.escape(words)):
        train(["vec_env=parallel", "logger=none", *arguments])

    assert not list(here.glob("runs/*/*"))
    assert set(multiprocessing.active_children()) <= set(before)


def test_mps_is_refused_where_there_is_none(door: Door) -> None:
    if sys.platform == "darwin":
        pytest.skip("this machine may have MPS")

    result = door("device=mps")

    assert result.returncode == 1
    assert "device=mps: this torch has no MPS; use device=cpu" in result.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_stop_signal_saves_ends_every_process_and_the_run_goes_on(
    door: Door, started: Any, here: Path, number: int, code: int
) -> None:
    settings = small(total_steps=10_000_000)
    process = started(*settings, "vec_env=parallel", "vec_env.n_workers=2")
    await_progress(process)
    children = children_of(process.pid)
    assert len(children) >= 2

    os.killpg(process.pid, number)  # as a terminal, timeout and SLURM do
    stdout, stderr = process.communicate(timeout=30)

    assert process.returncode == code, stderr
    assert stderr == ""
    told = [line for line in stdout.splitlines() if "stopped by" in line]
    assert len(told) == 1
    assert "resume with:" in told[0]
    wait_until_gone(children)
    run = only_run(here)
    env_steps = load_checkpoint(RunFolder.open(run), "latest")["env_steps"]
    assert [int(row["env_steps"]) for row in read_rows(run)] == list(range(32, env_steps + 1, 32))
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"

    resumed = door(f"resume={run}", f"total_steps={env_steps + 64}")

    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.startswith("CartPole-v1: 2 envs, 2 spawn workers, cpu")
    steps = [int(row["env_steps"]) for row in read_rows(run)]
    assert steps == list(range(32, env_steps + 65, 32))


@pytest.mark.slow
def test_a_stop_signal_while_a_checkpoint_is_saved_waits_for_it(started: Any, here: Path) -> None:
    wide = ["network.hidden_sizes=[1024,1024]", "callbacks.checkpoints.every_steps=1"]
    for _ in range(2):
        process = started(*small(total_steps=10_000_000), *wide)
        await_progress(process)
        wait_until(lambda: bool(list(here.glob("runs/*/*/checkpoints/.latest.pt.*.tmp"))), 30)

        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)

        assert process.returncode == 130, stderr
        assert "stopped by SIGINT" in stdout
        assert not list(here.glob("runs/*/*/checkpoints/.*"))


def test_ctrl_c_ends_a_whole_sweep(started: Any, here: Path) -> None:
    process = started("-m", "seed=1,2", *small(total_steps=10_000_000))
    await_progress(process)

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)

    assert process.returncode == 130
    assert len(list(here.glob("runs/CartPole-v1/*"))) == 1


@pytest.mark.slow
def test_after_a_kill_the_run_goes_on_from_its_last_checkpoint(
    door: Door, started: Any, here: Path
) -> None:
    settings = small(total_steps=10_000_000, callbacks__checkpoints__every_steps=96)
    process = started(*settings, "~callbacks.evaluation")
    wait_until(lambda: bool(list(here.glob("runs/*/*/checkpoints/latest.pt"))), 30)
    time.sleep(0.5)
    process.kill()
    process.wait()
    run = only_run(here)
    saved = load_checkpoint(RunFolder.open(run), "latest")["env_steps"]

    resumed = door(f"resume={run}", f"total_steps={saved + 64}")

    assert resumed.returncode == 0, resumed.stderr
    steps = [int(row["env_steps"]) for row in read_rows(run)]
    assert steps == list(range(32, saved + 65, 32))


def test_resume_keeps_the_config_of_the_run_but_for_what_the_command_names(here: Path) -> None:
    first = train(
        [*small(), "agent.gamma=0.9", "env=pendulum", "callbacks.evaluation.n_episodes=1"]
    )
    text = (first.run_dir / "config.yaml").read_text()

    second = train([f"resume={first.run_dir}", "total_steps=128", "agent.clip_range=0.1"])

    assert second.run_dir == first.run_dir
    assert second.env_steps == 128
    expected = text.replace("total_steps: 64", "total_steps: 128")
    expected = expected.replace("clip_range: 0.2", "clip_range: 0.1")
    assert (first.run_dir / "config.yaml").read_text() == expected
    iterations = [int(row["iteration"]) for row in read_rows(first.run_dir)]
    assert iterations == [1, 2, 3, 4]


def test_resume_can_take_and_drop_whole_groups(here: Path) -> None:
    first = train(small())

    train([f"resume={first.run_dir}", "total_steps=96", "vec_env=serial", "~callbacks.evaluation"])

    text = (first.run_dir / "config.yaml").read_text()
    assert "mode: serial" in text
    assert "evaluation:" not in text


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([], ConfigError, "is complete: 64 of 64 env steps; to go on, raise the goal"),
        (["experiment=cartpole"], ConfigError, "experiment= cannot be combined with resume="),
        (["total_steps=96", "env=acrobot"], Exception, "does not fit its env, agent and network"),
    ],
)
def test_a_resume_that_makes_no_sense_is_refused(
    here: Path, arguments: list[str], error: type[Exception], words: str
) -> None:
    run = train(small()).run_dir
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    with pytest.raises(error, match=words):
        train([f"resume={run}", *arguments])

    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_run_counted_in_episodes_can_be_resumed_by_steps(here: Path) -> None:
    run = train([*small(), "num_episodes=1"]).run_dir

    assert train([f"resume={run}", "total_steps=96"]).env_steps == 96


def test_a_run_without_wandb_can_be_resumed_with_it(here: Path) -> None:
    run = train(small(logger="none")).run_dir

    train([f"resume={run}", "total_steps=96", "logger.wandb.mode=disabled"])

    assert "_target_: ml_pipeline.runs.loggers.WandbLogger" in (run / "config.yaml").read_text()


def test_a_resumed_run_that_is_stopped_at_once_keeps_its_figures(here: Path) -> None:
    run = train(small()).run_dir
    before = json.loads((run / "summary.json").read_text())
    stop = "+callbacks.stop={_target_: own_parts.InterruptAtStart}"

    with pytest.raises(KeyboardInterrupt):
        train([f"resume={run}", "total_steps=96", stop])

    after = json.loads((run / "summary.json").read_text())
    assert after["env_steps"] == before["env_steps"] == 64
    assert after["metrics"] == before["metrics"]
    assert len(after["commands"]) == 2


def test_a_folder_that_is_no_run_cannot_be_resumed(here: Path) -> None:
    (here / "folder").mkdir()

    with pytest.raises(RunFolderError, match=r"it has no config\.yaml"):
        train(["resume=folder"])

    assert [path.name for path in here.iterdir()] == ["folder"]


def test_a_sweep_makes_a_run_per_value_and_ends_well(door: Door, here: Path) -> None:
    result = door("-m", "seed=1,2,3", *small())

    assert result.returncode == 0, result.stderr
    runs = list(here.glob("runs/CartPole-v1/*"))
    seeds = sorted(json.loads((run / "summary.json").read_text())["seed"] for run in runs)
    assert seeds == [1, 2, 3]
    assert sorted(path.name for path in here.iterdir()) == ["runs"]


def test_one_failed_job_ends_neither_the_others_nor_the_sweep_with_zero(
    door: Door, here: Path
) -> None:
    result = door("-m", "env.id=NoSuchEnv-v0,CartPole-v1", *small())

    assert result.returncode == 1
    assert "job 0 failed: env.id=NoSuchEnv-v0 is not a registered" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(list(here.glob("runs/CartPole-v1/*"))) == 1


def test_an_env_that_crashes_ends_the_run_with_its_traceback_and_its_state(here: Path) -> None:
    settings = [*small(), "env.target=tiny_envs.FaultyEnv", "+env.kwargs.fault=raise"]

    with pytest.raises(WorkerError, match=r"env 1 \(seed 2\) raised:[\s\S]*puck left the table"):
        train([*settings, "+env.kwargs.culprit=2", "vec_env=parallel"])

    summary = json.loads((only_run(here) / "summary.json").read_text())
    assert summary["status"] == "failed"


def test_weights_that_are_no_numbers_never_reach_a_checkpoint(here: Path) -> None:
    settings = [*small(), "env.target=tiny_envs.NanEnv", "~callbacks.evaluation"]

    with pytest.raises(BadValueError, match=r"env 0 gave the reward nan at its step 20"):
        train([*settings, "callbacks.checkpoints.every_steps=1"])

    state = load_checkpoint(RunFolder.open(only_run(here)), "latest")
    assert state["iteration"] == 1
    assert all(value.isfinite().all() for value in state["agent"]["model"].values())


def test_a_logger_of_the_users_own_hears_the_run_and_its_sweep(door: Door, here: Path) -> None:
    (here / "my_conf" / "logger").mkdir(parents=True)
    (here / "my_conf" / "logger" / "mine.yaml").write_text("mine: {_target_: own_parts.FileLogger}")

    settings = ["--config-dir", "my_conf", "-m", "seed=1,2", *small(logger="mine")]
    result = door(*settings, PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr
    heard = [json.loads(line) for line in (here / "heard").read_text().splitlines()]
    (sweep,) = [path.name for path in here.glob("runs/sweeps/*")]
    assert [(each["seed"], each["sweep"], each["env_steps"]) for each in heard] == [
        (seed, sweep, env_steps) for seed in (1, 2) for env_steps in (32, 64)
    ]


def test_help_is_worth_reading(door: Door) -> None:
    result = door("--help")

    assert result.returncode == 0
    for word in ("-m seed=1,2,3", "resume=", "env: acrobot, breakout", "learning_rate: 0.001"):
        assert word in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_on_a_terminal_there_is_a_live_display_and_no_prompt(here: Path) -> None:
    import pty  # not on Windows

    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    arguments = small(total_steps=640, logger="wandb")
    process = subprocess.Popen(
        door_command(*arguments), cwd=here, stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    screen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the other end is closed: the program has ended
            break
        screen += part
    os.close(parent)

    assert process.wait() == 0
    for word in (b"env steps", b"mean(100)", b"640/640", b"ETA", b"W&B offline", b"evaluate:"):
        assert word in screen


def test_old_pythons_are_told_in_one_line() -> None:
    old = old_python()
    if old is None:
        pytest.skip("no Python older than 3.10 on this machine")

    result = subprocess.run(
        [old, REPOSITORY / "train_ppo.py"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 1
    assert re.fullmatch(r"ml_pipeline needs Python 3.10 or newer, this is 3.\d\n", result.stderr)


def test_train_in_python_gives_back_the_agent(here: Path) -> None:
    result = train(small())

    assert result.agent.act_batch(np.zeros((1, 4)), deterministic=True).shape == (1,)
