"""The command line of training: output, own parts, errors, sweeps, and stop signals.

``command`` calls it in this process; tests of processes, signals and terminals start train_ppo.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import (
    REPOSITORY,
    Capture,
    Door,
    Start,
    await_line,
    call,
    children_of,
    door_command,
    error_line,
    only_run,
    read_rows,
    small,
    summary_of,
    wait_until,
    wait_until_gone,
)

from ml_pipeline.assembly import entry, run, script
from ml_pipeline.assembly.sweeps import SweepReport, job_runs
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder

Command = Callable[..., int]


@pytest.fixture
def command(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """``command("n_envs=2")`` runs train_ppo.py in this process and returns its exit code."""
    handlers = logging.root.handlers[:]
    monkeypatch.setattr(SweepReport, "_folder", None)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train_ppo.py", *arguments])
        try:
            return script.main()
        except SystemExit as stop:
            return int(stop.code or 0)

    yield call
    logging.root.handlers[:] = handlers  # Hydra's write to the captured stdout


def write_preset(folder: Path, group: str, text: str) -> None:
    (folder / "my_conf" / group).mkdir(parents=True)
    (folder / "my_conf" / group / "mine.yaml").write_text(text)


@pytest.mark.slow
def test_output_shows_envs_and_device_and_its_commands_work(door: Door, here: Path) -> None:
    result = door(*small(), "vec_env=parallel", "vec_env.n_workers=2")

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "CartPole-v1: 2 envs, 2 spawn workers, cpu"
    run = only_run(here).relative_to(here)
    assert f"run folder: {run}" in lines
    for word in ("env steps 64/64", "ETA", "iteration 2", "mean(100)", "episodes", "steps/s"):
        assert word in result.stdout
    assert "train_ppo.py n_envs=2" in (run / "summary.json").read_text()
    commands = dict(
        line.split(": ", 1) for line in lines if re.match(r"evaluate|resume|compare", line)
    )
    assert sorted(commands) == ["compare", "evaluate", "resume"]
    for command in commands.values():
        after = subprocess.run(command, shell=True, cwd=here, capture_output=True, text=True)
        assert after.returncode == 0, after.stderr


@pytest.mark.parametrize(
    ("module", "code", "override", "name"),
    [
        ("my_env", "class MyEnv(CountingEnv): pass", "env.target=my_env.MyEnv", "MyEnv"),
        (
            "my_ids",
            "import gymnasium; gymnasium.register('Mine-v0', CountingEnv)",
            "env.id=my_ids:Mine-v0",
            "Mine-v0",
        ),
    ],
)
@pytest.mark.slow
def test_own_env_is_found_in_the_current_folder_by_its_class_or_its_id(
    command: Command, here: Path, module: str, code: str, override: str, name: str
) -> None:
    (here / f"{module}.py").write_text(f"from tiny_envs import CountingEnv\n{code}\n")

    assert command(*small(), override, "+env.kwargs.length=4", "vec_env=parallel") == 0

    assert only_run(here).parent.name == name
    assert read_rows(only_run(here))[-1]["rollout/episode_return"] == "100.0"  # 10 + 20 + 30 + 40


OWN_ENV = """
id: null
target: tiny_envs.CountingEnv
kwargs: {length: 4}
wrappers: {scale: {_target_: tiny_envs.scale_reward, factor: 2.0}}
"""


def test_own_yaml_files_are_found_in_the_config_dir(
    command: Command, here: Path, capsys: Capture
) -> None:
    write_preset(here, "env", OWN_ENV)
    write_preset(here, "network", "{_target_: own_parts.Wide, width: 5}")
    write_preset(here, "callbacks", "{stop: {_target_: own_parts.StopAt, iteration: 1}}")
    settings = [word for word in small() if not word.startswith("callbacks")]
    mine = ["env=mine", "network=mine", "callbacks=mine"]

    assert command("--config-dir", "my_conf", *settings, *mine) == 0

    assert read_rows(only_run(here))[-1]["rollout/episode_return"] == "200.0"
    assert "width: 5" in (only_run(here) / "config.yaml").read_text()
    assert "iteration 1 at env step 32 of 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["+total_steps=3"], "+total_steps: the key exists; write total_steps=... without the +"),
        (["env.kwargs.size=3"], "env.kwargs.size=3: unknown key; to add a key, write +env.kwar"),
        (["agent.n_steps=1.5"], "agent.n_steps=1.5: must be an integer"),
        (["agent.learning_rate=fast"], "agent.learning_rate=fast: must be a number"),
        (["total_steps=long"], "total_steps=long: must be a number"),
        (["vec_env.n_workers=auto"], "vec_env.n_workers=auto: must be an integer, or null"),
        (["trust=maybe"], "trust=maybe: must be true or false"),
        (["callbacks.evaluation.zz=1"], "callbacks.evaluation.zz=1: unknown key; choose f"),
        (["env.wrappers=3"], "env.wrappers=3: must map names to values; write +env.w"),
        (["env=cartpol"], "env=cartpol: no such option; did you mean env=cartpole?"),
        (["vec_env=fast"], "vec_env=fast: no such option; choose from auto, parallel, serial, sh"),
        (["seed=1,2"], "seed=1,2: several values; for a sweep, write -m seed=1,2; for a list, "),
        (["seed=range(5)"], "seed=range(5): several values; for a sweep, write -m 'seed=range("),
        (["-m", "seed=1..3"], "seed=1..3: must be an integer; write -m seed=1,2,3"),
        (["env.id=X", "env=pendulum"], "env.id=X env=pendulum: both choose the env; leave one"),
        (["opponent.capacity=9"], "opponent.capacity=9: there is no opponent; write opponent="),
        (["cartpole"], "cartpole: settings are key=value; write: "),
        (["+lr=3"], "lr=3: unknown key; did you mean agent.learning_rate=3?"),
        (["~speed"], "Could not delete from config. 'speed' does not exist"),
        (["--config-dir", "nowhere"], "--config-dir "),
        (["run_root=${nope}"], "run_root: Interpolation key 'nope' not found"),
        (["-m", "run_root=${nope}", "seed=1,2"], "hydra.sweep.dir: Interpolation key 'nope'"),
        (["-m", "seed=1,two"], "seed=two: must be an integer"),
        (["--help", "agent.gamme=0.9"], "agent.gamme=0.9: unknown key"),
        (["device=gpu"], "device=gpu: must be auto | cpu | cuda | cuda:N | mps; write device=cuda"),
        (["callbacks=[early_stop]"], "callbacks=early_stop: no such option; did you mean callbac"),
        (["curriculum.phases=3"], "curriculum.phases=3: there is no curriculum; choose or write "),
        (["resume=true"], "resume=true: for the run started last, write resume=latest"),
        (["resume=nowhere"], "resume=nowhere: nowhere is not a run folder: it does not exist;"),
        (["-m", "seed=1", "--cfg", "job"], "-m: cannot be combined with --cfg, --info or --run;"),
    ],
)
def test_mistake_prints_one_line_and_exits_with_code_1(
    command: Command, here: Path, capsys: Capture, arguments: list[str], line: str
) -> None:
    assert command(*arguments) == 1

    assert error_line(capsys).startswith(line)
    assert not (here / "runs" / "CartPole-v1").exists()


def test_unexpected_error_keeps_its_traceback_without_frames_of_hydra(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(run, "build_record", fail)

    with pytest.raises(RuntimeError, match="a mistake of ours") as caught:
        command(*small())

    assert not [frame for frame in caught.traceback if "hydra" in str(frame.path)]


def test_script_reports_a_mistake_on_stderr(door: Door) -> None:
    result = door("agent.gamme=0.9")

    assert result.returncode == 1
    assert result.stderr == "agent.gamme=0.9: unknown key; did you mean agent.gamma=0.9?\n"


def test_missing_atari_is_reported_with_the_commands_that_install_it(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)

    assert command("env=pong") == 1

    assert error_line(capsys) == (
        "env.id=ale_py:PongNoFrameskip-v4 needs ale_py, which is not installed: "
        'make atari, or pip install "ml_pipeline[atari]"'
    )
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("number", "code", "start_method"),
    [
        (signal.SIGINT, 130, "fork"),
        pytest.param(signal.SIGTERM, 143, "spawn", marks=pytest.mark.slow),
    ],
)
def test_stop_signal_saves_the_run_ends_every_process_and_allows_a_resume(
    command: Command, started: Start, here: Path, number: int, code: int, start_method: str
) -> None:
    workers = ["vec_env=parallel", "vec_env.n_workers=2", f"vec_env.start_method={start_method}"]
    process = started(*small(total_steps=10_000_000), *workers)
    await_line(process, "env steps")
    children = children_of(process.pid)
    assert len(children) >= 2

    os.killpg(process.pid, number)  # as terminals, timeout and SLURM do
    stdout, stderr = process.communicate(timeout=30)

    assert process.returncode == code, stderr
    assert stderr == ""
    (line,) = [line for line in stdout.splitlines() if "stopped by" in line]
    assert "train_ppo.py resume=" in line
    wait_until_gone(children)
    run = only_run(here)
    env_steps = load_checkpoint(RunFolder.open(run), "latest")["env_steps"]
    assert [int(row["env_steps"]) for row in read_rows(run)] == list(range(32, env_steps + 1, 32))
    assert summary_of(run)["status"] == "interrupted"

    assert command(f"resume={run}", f"total_steps={env_steps + 64}") == 0

    steps = [int(row["env_steps"]) for row in read_rows(run)]
    assert steps == list(range(32, env_steps + 65, 32))


@pytest.mark.slow
def test_stop_signal_waits_for_a_checkpoint_that_is_being_saved(started: Start, here: Path) -> None:
    wide = ["network.hidden_sizes=[1024,1024]", "callbacks.checkpoints.every_steps=1"]
    for _ in range(2):
        process = started(*small(total_steps=10_000_000), *wide)
        await_line(process, "env steps")
        wait_until(lambda: bool(list(here.glob("runs/*/*/checkpoints/.latest.pt.*.tmp"))), 30)

        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)

        assert process.returncode == 130, stderr
        assert "stopped by SIGINT" in stdout
        assert not list(here.glob("runs/*/*/checkpoints/.*"))


@pytest.mark.slow
def test_stop_signal_ends_the_whole_sweep(command: Command, here: Path) -> None:
    stop = "+callbacks.stop={_target_: stopped_runs.StopAfter, n_iterations: 0}"

    assert command("-m", "seed=1,2", *small(), stop) == 143

    assert len(list(here.glob("runs/CartPole-v1/*"))) == 1


def test_sweep_makes_one_run_per_value_and_passes_its_name_to_the_logger(
    command: Command, here: Path
) -> None:
    write_preset(here, "logger", "mine: {_target_: own_parts.FileLogger}")

    assert command("--config-dir", "my_conf", "-m", "seed=1,2", *small(logger="mine")) == 0

    assert len(list(here.glob("runs/CartPole-v1/*"))) == 2
    assert sorted(path.name for path in here.iterdir()) == ["heard", "my_conf", "runs"]
    heard = [json.loads(line) for line in (here / "heard").read_text().splitlines()]
    (sweep,) = [path.name for path in here.glob("runs/sweeps/*")]
    assert [(each["seed"], each["sweep"], each["env_steps"]) for each in heard] == [
        (seed, sweep, env_steps) for seed in (1, 2) for env_steps in (32, 64)
    ]


@pytest.mark.slow
def test_failed_job_does_not_stop_the_sweep_and_makes_it_exit_with_1(
    command: Command, here: Path, capsys: Capture
) -> None:
    assert command("-m", "env.id=NoSuchEnv-v0,CartPole-v1", *small()) == 1

    output = capsys.readouterr()
    assert "job 0: failed: env.id=NoSuchEnv-v0" in output.err
    assert len(output.err.splitlines()) == 1  # no lines of Hydra
    assert "1 of 2 jobs finished" in output.out
    assert len(list(here.glob("runs/CartPole-v1/*"))) == 1


def test_sweep_is_written_below_run_root_even_if_the_env_changes_the_folder(
    command: Command, here: Path
) -> None:
    (here / "elsewhere").mkdir()
    env = ["env.target=own_parts.Wanderer", f"+env.kwargs.folder={here}/elsewhere"]

    assert command("-m", "seed=1,2", "run_root=my/runs", *small(), *env, "vec_env=serial") == 0

    (sweep,) = here.glob("my/runs/sweeps/*")
    assert set(here.glob("my/runs/Wanderer/*")) == {run.resolve() for run in job_runs(sweep)}
    assert len(job_runs(sweep)) == 2
    assert not list((here / "elsewhere").iterdir())
    os.chdir(here / "elsewhere")
    assert [run.is_dir() for run in job_runs(sweep)] == [True, True]


def test_help_shows_groups_keys_and_commands_of_the_program(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    with pytest.raises(SystemExit) as caught:
        entry.train(["some/where/train_dqn.py", "--help"])

    assert caught.value.code == 0
    output = capsys.readouterr().out
    shown = "python some/where/train_dqn.py -m seed=1,2,3"
    for words in (shown, "env: acrobot, atari, brax, breakout", "learning_rate: 0.001"):
        assert words in output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_terminal_gets_a_live_display_and_no_prompt(here: Path) -> None:
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
        except OSError:  # the program has ended and closed the other end
            break
        screen += part
    os.close(parent)

    assert process.wait() == 0
    for word in (b"env steps", b"mean(100)", b"640/640", b"ETA", b"W&B offline", b"evaluate:"):
        assert word in screen


def test_old_python_is_refused_in_one_line(old_python: str) -> None:
    result = call(old_python, REPOSITORY / "train_ppo.py")

    assert result.returncode == 1
    assert re.fullmatch(r"ml_pipeline needs Python 3.10 or newer, this is 3.\d\n", result.stderr)
