"""How programs end: exit codes, missing packages, and threads that an env has left running."""

from __future__ import annotations

import errno
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, TESTS, Capture, Door, call, small
from lowest import lowest_versions

from ml_pipeline.assembly.script import exit_code
from ml_pipeline.extras import CORE_PACKAGES, core_fix

LEAVE_A_THREAD = """
import sys, threading, time
from ml_pipeline.assembly import script
thread_seconds, code = float(sys.argv[1]), int(sys.argv[2])
script._THREAD_SECONDS = float(sys.argv[3])

def command():
    threading.Thread(target=time.sleep, args=(thread_seconds,), name="left", daemon=False).start()
    print("done")
    if code:
        sys.exit(code)

sys.exit(script.exit_code(command))
"""


@pytest.mark.parametrize("code", ["0", "3"])
@pytest.mark.parametrize(
    ("thread_seconds", "wait_seconds", "error"),
    [
        ("1000", "0.1", "threads=left: still running 0.1 s after the end of the program"),
        ("0.1", "1000", ""),
    ],
)
def test_a_program_ends_despite_a_thread(
    thread_seconds: str, wait_seconds: str, error: str, code: str
) -> None:
    program = [sys.executable, "-c", LEAVE_A_THREAD, thread_seconds, code, wait_seconds]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=TESTS)

    assert result.returncode == int(code)
    assert result.stdout == "done\n"
    assert result.stderr.startswith(error)
    assert bool(result.stderr) == bool(error)


PRINT_TO_NOBODY = """
import os, sys
from ml_pipeline.assembly.script import exit_code
read, write = os.pipe()
os.close(read)
sys.stdout = open(write, "w")
sys.exit(exit_code(lambda: %s))
"""


@pytest.mark.parametrize(
    "command",
    [
        "print('much' * 100_000)",  # fails at once
        "(print('help'), sys.exit(0))",  # as argparse does; fails when it is flushed
    ],
)
def test_program_whose_output_nobody_reads_ends_quietly(command: str) -> None:
    program = [sys.executable, "-c", PRINT_TO_NOBODY % command]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=TESTS)

    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_file_that_the_system_refuses_is_one_line(code: int, capsys: Capture) -> None:
    def command() -> None:
        raise OSError(code, "so the system says", "runs/a.mp4")

    assert exit_code(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runs/a.mp4: so the system says; ")


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    def command() -> None:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", "runs")

    with pytest.raises(IsADirectoryError):
        exit_code(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "evaluate RUN --video --episodes 1",
        "compare RUN --report new",
        "export RUN",
        "runs prune --status finished --yes",
        "train resume=RUN total_steps=128",
        "train device=cpu logger=none",
        "train -m device=cpu logger=none seed=1,2",
    ],
)
def test_read_only_folder_is_one_line(finished_run: Path, here: Path, command: str) -> None:
    words = command.replace("RUN", str(finished_run)).split()
    program = shlex.join([sys.executable, "-m", "ml_pipeline", *words])
    mount = f"mount --bind {here} {here} && mount -o remount,ro,bind {here} && cd {here}"
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
        pytest.skip("this machine does not allow a mount in a user namespace")

    result = call("unshare", "-rm", "bash", "-c", f"{mount} && {program}", cwd=here)

    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "Read-only file system" in result.stderr.splitlines()[-1]


def test_other_broken_pipe_is_an_error() -> None:
    def command() -> None:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        exit_code(command)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "parallel", "shared"])
def test_a_run_ends_despite_the_threads_of_its_envs(door: Door, mode: str) -> None:
    result = door(*small(env__target="faulty_envs.ThreadEnv", vec_env=mode), PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["train_ppo.py"], "hydra"),
        (["train_dqn.py", "env=cartpole"], "hydra"),
        (["train_sac.py", "--help"], "hydra"),
        (["-m", "ml_pipeline", "runs"], "yaml"),
        (["-m", "ml_pipeline", "train"], "hydra"),
    ],
)
def test_clone_whose_packages_are_not_installed_names_one_and_the_fix(
    arguments: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # -S: without site-packages, and without the prefix of a venv.
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    result = call(sys.executable, "-S", *arguments, cwd=REPOSITORY, PYTHONPATH="")

    assert result.stderr == f"{package} is not installed; {core_fix()}\n"
    assert (result.returncode, result.stdout) == (1, "")


def test_python_without_the_packages_is_sent_to_the_venv_of_make(tmp_path: Path) -> None:
    assert core_fix(tmp_path).startswith("install ml_pipeline with its packages: pip install ")

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()

    activate = f"source {shlex.quote(str(tmp_path))}/.venv/bin/activate"
    assert core_fix(tmp_path) == f"use the Python that has the packages: {activate}"


TRAIN_WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = ["train_ppo.py"]
runpy.run_path("train_ppo.py", run_name="__main__")
"""


def test_package_that_is_missing_later_is_also_one_line() -> None:
    result = call(sys.executable, "-c", TRAIN_WITHOUT_TORCH, cwd=REPOSITORY)

    assert result.returncode == 1
    assert result.stderr == f"torch is not installed; {core_fix()}\n"


def test_module_that_is_not_a_dependency_keeps_its_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="my_missing_env"):
        exit_code(lambda: __import__("my_missing_env"))


def test_every_dependency_is_a_core_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = text.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    names = re.findall(r'^ +"([\w-]+)', listed, flags=re.MULTILINE)

    assert {name.removesuffix("-core") for name in names} <= {*CORE_PACKAGES}
    assert len(names) > 5


def test_lowest_versions_are_those_of_every_dependency() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = text.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    names = re.findall(r'^ +"([\w-]+)', listed, flags=re.MULTILINE)

    lowest = lowest_versions(text)

    assert [each.partition("==")[0] for each in lowest] == names
    example = '\ndependencies = [\n    # a comment\n    "torch>=2.6,<2.14",\n]\n'
    assert lowest_versions(example) == ["torch==2.6"]
