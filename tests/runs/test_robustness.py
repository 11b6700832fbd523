"""Problems around a run: full disks, closed pipes, damaged files, unusual callers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from conftest import (
    REPOSITORY,
    Capture,
    call,
    door_command,
    only_run,
    read_rows,
    small,
    summary_of,
    wait_until,
)

from ml_pipeline.assembly.run import train
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.large_files import disk_remark
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError
from ml_pipeline.training.contracts import Trainer


@pytest.mark.slow
def test_training_continues_when_the_reader_of_its_output_exits(here: Path) -> None:
    command = subprocess.list2cmdline(door_command(*small(total_steps=640)))

    result = call("bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}", cwd=here)

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert summary_of(only_run(here))["status"] == "finished"
    assert len(read_rows(only_run(here))) == 20


@pytest.mark.slow
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
    assert summary_of(only_run(here))["status"] == "interrupted"
    saved = load_checkpoint(RunFolder.open(only_run(here)), "latest")["env_steps"]
    assert saved == int(read_rows(only_run(here))[-1]["env_steps"])


@pytest.mark.skipif(sys.platform == "win32", reason="limits file sizes with ulimit")
@pytest.mark.slow
def test_a_full_disk_is_a_one_line_error_and_keeps_the_last_checkpoint(
    finished_run: Path, here: Path
) -> None:
    kept = (finished_run / "checkpoints" / "latest.pt").read_bytes()
    blocks = len(kept) // 1024 - 4
    command = subprocess.list2cmdline(door_command(f"resume={finished_run}", "total_steps=640"))

    result = call("bash", "-c", f"ulimit -f {blocks}; {command}", cwd=here)

    assert result.returncode == 1
    assert re.search(
        r"could not save .*(best\w*|latest)\.pt: .*; the previous checkpoint is kept", result.stderr
    )
    assert "Traceback" not in result.stderr
    assert "resume with: " in result.stdout
    assert (finished_run / "checkpoints" / "latest.pt").read_bytes() == kept
    assert not list(finished_run.rglob("*.tmp"))


@pytest.mark.slow
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


class Hoarder:
    """A trainer whose files hold a byte per env step."""

    def disk_need(self, env_steps: int) -> tuple[int, str]:
        return env_steps, "lower hoard=2"


def test_files_that_will_not_fit_the_disk_are_named_with_both_sizes(finished_run: Path) -> None:
    run, trainer = RunFolder(finished_run), cast("Trainer", Hoarder())

    remark = disk_remark(run, trainer, 10**18)

    assert disk_remark(run, trainer, 1) == ""
    assert re.fullmatch(
        r".*/replay: needs 1,000,000\.0 TB for the transitions of this run, and its disk has "
        r"[\d.e+]+ \wB free, so saving will fail; lower hoard=2, free some space, or set run_root "
        r"to a folder on a larger disk",
        remark,
    )


def test_files_that_are_written_already_need_no_free_disk(finished_run: Path) -> None:
    run, trainer = RunFolder(finished_run), cast("Trainer", Hoarder())
    run.replay.mkdir()
    with (run.replay / "0-1-a.rows").open("wb") as file:
        file.truncate(2**42)  # a hole, which takes no space

    assert disk_remark(run, trainer, 2**42) == ""


@pytest.mark.slow
def test_a_replay_that_will_not_fit_the_disk_is_named_before_training(here: Path) -> None:
    sizes = ["total_steps=100_000", "agent.buffer_size=100_000", "agent.learning_starts=90_000"]
    settings = ["agent=dqn", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"]
    train_there = subprocess.list2cmdline(door_command(*settings, *sizes))
    disk = f"mount -t tmpfs -o size=1m tmpfs {here} && cd {here}"
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
        pytest.skip("this machine does not allow a mount in a user namespace")

    result = call("unshare", "-rm", "bash", "-c", f"{disk} && {train_there}")

    named = r"/replay: needs 3 MB for .* has \d.* free, so saving will fail; .*\nenv steps 64/"
    assert re.search(named, result.stdout)  # 100,000 transitions of 30 bytes


def test_a_run_finishes_even_if_an_env_raises_in_close(here: Path) -> None:
    with pytest.warns(RuntimeWarning, match="the door is stuck"):
        run = train([*small(), "env.target=tiny_envs.UncloseableEnv"]).run_dir

    assert summary_of(run)["status"] == "finished"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"steps,a\n1,2\n", "KeyError"),
        (b"\xff\xfe\x00\n", "UnicodeDecodeError"),
        (b"env_steps,a\n32,much\n", "ValueError"),
    ],
)
def test_damaged_metrics_are_named(finished_run: Path, content: bytes, kind: str) -> None:
    (finished_run / "metrics.csv").write_bytes(content)

    with pytest.raises(UserError, match=rf"metrics\.csv is damaged: {kind}"):
        train([f"resume={finished_run}", "total_steps=128"])


def test_a_run_with_an_incomplete_summary_can_be_resumed(finished_run: Path) -> None:
    (finished_run / "summary.json").write_text('{"seconds": null}')

    assert train([f"resume={finished_run}", "total_steps=128"]).env_steps == 128


def test_a_run_folder_that_cannot_be_created_is_a_user_error(here: Path) -> None:
    (here / "runs").touch()

    with pytest.raises(RunFolderError, match="cannot create the run folder"):
        train(small())


def test_commands_that_need_a_checkpoint_are_not_printed_without_one(
    here: Path, capsys: Capture
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
        f"from ml_pipeline.assembly.run import train\ntrain({arguments!r})\n"
    )

    result = call(sys.executable, "unguarded.py", cwd=here, PYTHONPATH=str(REPOSITORY))

    assert result.returncode == 1
    assert "put the call of train under: if __name__ == '__main__':" in result.stderr
    assert not list(here.glob("runs/*/*"))  # the trial of the env found it


def test_train_works_inside_another_hydra_program(here: Path) -> None:
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    with initialize(config_path=None, version_base="1.3"):
        before = GlobalHydra.instance().hydra
        train(small())
        assert GlobalHydra.instance().hydra is before


def test_resume_dot_resumes_the_run_of_the_current_folder(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished_run)

    assert train(["resume=.", "total_steps=128"]).run_dir == finished_run
