"""Problems around a run: full disks, closed pipes, damaged files, parts that do not fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, TESTS, Door, door_command, only_run, read_rows, small, wait_until

from ml_pipeline.__main__ import main
from ml_pipeline.build import train
from ml_pipeline.envs.vec_env import WorkerError
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError


def status_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["status"])


def test_training_continues_when_the_reader_of_its_output_exits(here: Path) -> None:
    command = subprocess.list2cmdline(door_command(*small(total_steps=640)))

    result = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert status_of(only_run(here)) == "finished"
    assert len(read_rows(only_run(here))) == 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_closed_terminal_ends_the_run_with_a_complete_record(here: Path) -> None:
    import pty

    command = door_command(*small(total_steps=10_000_000), "vec_env=parallel")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
    screen = b""
    while b"iteration" not in screen or not list(here.glob("runs/*/*/metrics.csv")):
        screen += os.read(terminal, 65536)
    wait_until(lambda: len(read_rows(only_run(here))) > 2)

    os.close(terminal)

    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert status_of(only_run(here)) == "interrupted"
    saved = load_checkpoint(RunFolder.open(only_run(here)), "latest")["env_steps"]
    assert saved == int(read_rows(only_run(here))[-1]["env_steps"])


def test_an_env_that_calls_sys_exit_makes_the_run_fail(here: Path) -> None:
    settings = [*small(), "env.target=tiny_envs.FaultyEnv", "+env.kwargs.fault=sys.exit"]

    with pytest.raises(WorkerError, match=r"env 0 \(seed 1\) raised:[\s\S]*SystemExit: 3"):
        train([*settings, "+env.kwargs.culprit=1", "vec_env=serial"])

    assert status_of(only_run(here)) == "failed"


def test_two_processes_cannot_train_in_one_folder(here: Path) -> None:
    run = train(small()).run_dir
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    with (
        RunFolder.open(run).locked(),
        pytest.raises(RunFolderError, match="is being trained by another process"),
    ):
        train([f"resume={run}", "total_steps=128"])

    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert train([f"resume={run}", "total_steps=128"]).env_steps == 128


@pytest.mark.skipif(sys.platform == "win32", reason="limits file sizes with ulimit")
def test_a_full_disk_is_a_one_line_error_and_keeps_the_last_checkpoint(here: Path) -> None:
    run = train([*small(), "network.hidden_sizes=[8]"]).run_dir
    kept = (run / "checkpoints" / "latest.pt").read_bytes()
    blocks = len(kept) // 1024 - 4
    command = subprocess.list2cmdline(door_command(f"resume={run}", "total_steps=640"))

    result = subprocess.run(
        ["bash", "-c", f"ulimit -f {blocks}; {command}"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1
    assert re.search(
        r"could not save .*(best|latest)\.pt: .*; the previous checkpoint is kept", result.stderr
    )
    assert "Traceback" not in result.stderr
    assert "resume with: " in result.stdout
    assert (run / "checkpoints" / "latest.pt").read_bytes() == kept
    assert not list(run.rglob("*.tmp"))


def test_a_run_on_a_full_disk_does_not_stay_running(here: Path) -> None:
    overrides = small(total_steps=100000, callbacks__checkpoints__every_steps=1)
    train_there = subprocess.list2cmdline(door_command(*overrides))
    disk = f"mount -t tmpfs -o size=220k tmpfs {here} && cd {here}"
    script = f"{disk} && {train_there}; cat runs/*/*/summary.json"
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
        pytest.skip("this machine does not allow a mount in a user namespace")

    result = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, check=False
    )

    assert "No space left on device" in result.stderr
    assert '"status": "failed"' in result.stdout


def test_a_run_finishes_even_if_an_env_raises_in_close(here: Path) -> None:
    with pytest.warns(RuntimeWarning, match="the door is stuck"):
        run = train([*small(), "env.target=tiny_envs.UncloseableEnv"]).run_dir

    assert status_of(run) == "finished"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", b"a: [", r"config\.yaml: not the config of a run"),
        ("config.yaml", b"", r"config\.yaml: not the config of a run: it names no network"),
        ("metrics.csv", b"steps,a\n1,2\n", r"metrics\.csv is damaged: KeyError"),
        ("metrics.csv", b"\xff\xfe\x00\n", r"metrics\.csv is damaged: UnicodeDecodeError"),
        ("metrics.csv", b"env_steps,a\n32,much\n", r"metrics\.csv is damaged: ValueError"),
        ("summary.json", b"{", r"summary\.json is not valid JSON"),
        ("summary.json", b'{"seconds": "long"}', r"summary\.json is damaged: could not convert"),
        (
            "checkpoints/latest.pt",
            b"hello",
            r"latest\.pt is not a checkpoint of format 2: it is truncated",
        ),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    here: Path, name: str, content: bytes, words: str
) -> None:
    run = train(small()).run_dir
    (run / name).write_bytes(content)

    with pytest.raises(UserError, match=words):
        train([f"resume={run}", "total_steps=128"])


def test_compare_skips_a_damaged_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (train(small()).run_dir for _ in range(2))
    (bad / "metrics.csv").write_text("env_steps,a\n32,much\n")
    capsys.readouterr()

    assert main(["compare", str(good), str(bad)]) == 0

    captured = capsys.readouterr()
    assert str(good) in captured.out
    assert "left out:" in captured.err


def test_a_run_with_an_incomplete_summary_can_be_resumed(here: Path) -> None:
    run = train(small()).run_dir
    (run / "summary.json").write_text('{"seconds": null}')

    assert train([f"resume={run}", "total_steps=128"]).env_steps == 128


def test_a_run_folder_that_cannot_be_created_is_a_user_error(here: Path) -> None:
    (here / "runs").touch()

    with pytest.raises(RunFolderError, match="cannot create the run folder"):
        train(small())


@pytest.mark.parametrize(
    "environment",
    [
        {"WANDB_MODE": "foo"},
        pytest.param({"WANDB_BASE_URL": "notaurl"}, marks=pytest.mark.slow),
        pytest.param({"WANDB_DISABLED": "true"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_without_wandb_if_its_settings_are_wrong(
    door: Door, here: Path, environment: dict[str, str]
) -> None:
    result = door(*small(logger="wandb"), **environment)

    assert result.returncode == 0, result.stderr
    assert "W&B off: " in result.stdout or "W&B disabled" in result.stdout


def own_network(name: str) -> list[str]:
    return ["network=own", f"network._target_=own_parts.{name}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["env.target=own_parts.OldApi"],
            "cannot be reset with a seed and stepped as in",
        ),
        (
            ["+callbacks.x={_target_: own_parts.Anything}"],
            "callbacks.x: Anything is not",
        ),
        (["+logger.x={_target_: own_parts.Anything}"], "logger.x: Anything has no log"),
        (
            own_network("WrongSize"),
            "network cannot process an observation of shape (4,)",
        ),
        (
            ["env.target=own_broken.Env"],
            "env.target=own_broken.Env: ZeroDivisionError in own_broken",
        ),
        (["env.target=own_lacking.Env"], "own_lacking needs no_such_package, which is not"),
        (["env.target=own_parts.LateMask"], "returns an action_mask from step, but not from"),
        (["env.target=own_parts.NoInfo"], "TypeError: info must be a dict, got None"),
        (
            ["+callbacks.x={_target_: own_parts.OddState}"],
            "the state of callbacks.x['best'][0]: a checkpoint cannot contain a numpy.float64",
        ),
        (own_network("Lazy"), "network Lazy has lazy layers"),
        (own_network("Failing"), "network: RuntimeError: out of luck"),
        (own_network("OneAtATime"), "network cannot process an observation of shape (4,)"),
    ],
)
def test_custom_parts_are_checked_before_the_run_starts(
    here: Path, arguments: list[str], words: str
) -> None:
    (here / "own_broken.py").write_text("1 / 0\n")
    (here / "own_lacking.py").write_text("import no_such_package\n")

    with pytest.raises(UserError, match=re.escape(words)):
        train([*small(), *arguments])

    assert not list(here.glob("runs/*/*"))


def test_an_env_id_may_name_the_module_that_registers_it(door: Door, here: Path) -> None:
    (here / "my_module.py").write_text(
        "import gymnasium as gym\ngym.register('Mine-v0', entry_point='tiny_envs:CountingEnv')\n"
    )

    result = door(*small(), "env.id=my_module:Mine-v0", "vec_env=parallel", PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr
    assert only_run(here).parent.name == "Mine-v0"


def test_commands_that_need_a_checkpoint_are_not_printed_without_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train([*small(), "~callbacks.checkpoints"])

    out = capsys.readouterr().out
    assert "compare: " in out
    assert "resume: " not in out
    assert "evaluate: " not in out


@pytest.mark.slow
def test_a_script_without_a_main_guard_gets_a_clear_error(here: Path) -> None:
    arguments = [*small(), "vec_env=parallel"]
    (here / "unguarded.py").write_text(
        f"from ml_pipeline.build import train\ntrain({arguments!r})\n"
    )

    result = subprocess.run(
        [sys.executable, "unguarded.py"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )

    assert result.returncode == 1
    assert "put the call of train under: if __name__ == '__main__':" in result.stderr
    assert len(list(here.glob("runs/*/*"))) == 1


def test_train_works_inside_another_hydra_program(here: Path) -> None:
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    with initialize(config_path=None, version_base="1.3"):
        before = GlobalHydra.instance().hydra
        train(small())
        assert GlobalHydra.instance().hydra is before


def test_resume_dot_resumes_the_run_of_the_current_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here / train(small()).run_dir
    monkeypatch.chdir(run)

    assert train(["resume=.", "total_steps=128"]).run_dir == run
