"""Loggers: the local record, and a W&B that is never in the way."""

from __future__ import annotations

import csv
import http.server
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import wandb
from conftest import Door, door_command, only_run, read_rows, small, wait_until

from ml_pipeline.build import train
from ml_pipeline.runs.loggers import CsvLogger, WandbLogger, has_wandb_key
from ml_pipeline.runs.run_folder import RunFolder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_metric_that_comes_later_adds_its_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    logger = CsvLogger(path)
    logger.log({"a": 1.0}, env_steps=10)
    logger.log({"a": 2.0, "b": 5.0}, env_steps=20)
    logger.log({"b": 6.0}, env_steps=30)
    logger.close()

    assert rows_of(path) == [
        {"env_steps": "10", "a": "1.0", "b": ""},
        {"env_steps": "20", "a": "2.0", "b": "5.0"},
        {"env_steps": "30", "a": "", "b": "6.0"},
    ]


def test_a_resumed_record_drops_what_came_after_the_checkpoint_and_a_torn_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("env_steps,a\n10,1.0\n20,2.0\n30,3.0\n4")

    logger = CsvLogger(path, from_env_steps=20)
    logger.log({"a": 9.0}, env_steps=30)
    logger.close()

    assert [(row["env_steps"], row["a"]) for row in rows_of(path)] == [
        ("10", "1.0"),
        ("20", "2.0"),
        ("30", "9.0"),
    ]


def test_each_row_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv")

    logger.log({"a": 1.0}, env_steps=10)

    assert len(rows_of(tmp_path / "metrics.csv")) == 1
    logger.close()


def test_without_a_key_wandb_works_offline_and_says_how_to_upload(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(small(logger="wandb"))

    offline = list((result.run_dir / "wandb").glob("offline-run-*"))
    assert len(offline) == 1
    assert offline[0].name.endswith(result.run_dir.name)
    # W&B's own process writes the file, and may still be at it.
    wait_until(lambda: any(path.stat().st_size for path in offline[0].glob("*.wandb")))
    out = capsys.readouterr().out
    assert f"-m wandb sync {result.run_dir}/wandb/offline-*\n" in out


def test_wandb_writes_into_the_run_folder_wherever_its_process_was_started(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (here / name).mkdir()
        monkeypatch.chdir(here / name)
        train([*small(logger="wandb"), "logger.wandb.mode=offline"])

    pattern = "*/runs/*/*/wandb/offline-run-*/run-*.wandb"
    wait_until(lambda: len(list(here.glob(pattern))) == 2, 20)


def test_two_wandb_runs_in_one_process_are_two_records(here: Path) -> None:
    folders = [train(small(logger="wandb", seed=seed)).run_dir / "wandb" for seed in (1, 2)]

    assert [len(list(folder.glob("offline-run-*"))) for folder in folders] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False], ids=["silent server", "refused"])
def test_with_a_key_but_no_server_the_run_goes_on_offline(
    door: Door, here: Path, listens: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = door(
            *small(logger="wandb"),
            "logger.wandb.timeout_seconds=15",
            WANDB_API_KEY="0" * 40,
            WANDB_BASE_URL=address,
        )

    assert result.returncode == 0, result.stderr
    assert "W&B offline, its server does not answer; upload later with" in result.stdout
    assert len(read_rows(only_run(here))) == 2


def test_without_a_key_nothing_is_sent_to_the_server(door: Door) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        result = door(*small(logger="wandb"), WANDB_BASE_URL=address)

        assert result.returncode == 0, result.stderr
        with pytest.raises(BlockingIOError):  # nobody has knocked
            server.accept()


def test_with_a_key_and_a_server_that_is_no_wandb_the_run_goes_on_offline(
    door: Door, here: Path
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = door(
            *small(logger="wandb"),
            "logger.wandb.timeout_seconds=15",
            WANDB_API_KEY="0" * 40,
            WANDB_BASE_URL=f"http://127.0.0.1:{server.server_address[1]}",
        )
        server.shutdown()

    assert result.returncode == 0, result.stderr
    assert "W&B offline, online failed: " in result.stdout
    assert len(read_rows(only_run(here))) == 2


class NotFound(http.server.BaseHTTPRequestHandler):
    """Answers everything with a 404."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for the process in /proc")
def test_a_wandb_process_that_dies_stops_nothing_and_loses_no_row(here: Path) -> None:
    settings = [*small(total_steps=6_400), "logger=wandb", "logger.wandb.mode=offline"]
    settings += ["callbacks.media.every_steps=320", "vec_env=serial"]
    command = door_command(*settings)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Without W&B's own variables: they would lead to this process's W&B service.
    environment = {k: v for k, v in os.environ.items() if "WANDB" not in k}
    process = subprocess.Popen(command, cwd=here, text=True, env=environment, **pipes)
    service = partial(children_named, process.pid, "wandb-core")
    wait_until(lambda: bool(service()) and bool(list(here.glob("runs/*/*/metrics.csv"))), 60)

    for pid in service():
        os.kill(pid, signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 0, stderr
    assert "Traceback" not in stdout + stderr
    assert "W&B " in stdout
    assert len(read_rows(only_run(here))) == 200


def children_named(parent: int, name: str) -> list[int]:
    """Processes below ``parent`` with ``name`` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
            if name in words and f"--pid\0{parent}\0" in words:
                found.append(int(folder.name))
    return found


def test_a_key_is_found_in_the_environment_and_in_netrc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not has_wandb_key()
    netrc = tmp_path / "netrc"
    host = urlparse(wandb.setup().settings.base_url).hostname
    netrc.write_text(f"machine {host}\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert has_wandb_key()
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_wandb_key()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.unused(tmp_path, "env")
    run.make()
    return run


CONFIG = {"env_name": "CartPole-v1", "agent_name": "ppo", "agent": {"gamma": 0.9}}


@pytest.mark.parametrize(
    ("sweep", "group", "expected"),
    [(None, None, "CartPole-v1-ppo"), ("morning", None, "morning"), ("morning", "mine", "mine")],
)
def test_a_wandb_run_carries_what_comparison_needs(
    run: RunFolder, sweep: str | None, group: str | None, expected: str
) -> None:
    logger = WandbLogger(run, CONFIG, sweep, mode="offline", group=group, tags=["try"])
    described = logger.wandb_run
    logger.close()

    assert described.group == expected
    assert described.tags == ("CartPole-v1", "ppo", "try")
    assert described.job_type == "train"
    assert described.id == described.name == run.name
    assert described.config["agent"] == {"gamma": 0.9}


def test_a_second_wandb_run_is_never_the_first_one_again(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.unused(tmp_path, "other")
    other.make()

    first = WandbLogger(run, CONFIG, None, mode="offline")
    second = WandbLogger(other, CONFIG, None, mode="offline")

    assert (first.wandb_run.id, second.wandb_run.id) == (run.name, other.name)
    first.close()
    second.close()


def test_the_users_wandb_mode_is_respected(monkeypatch: pytest.MonkeyPatch, run: RunFolder) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")

    logger = WandbLogger(run, CONFIG, None)
    logger.log({"a": 1.0}, env_steps=1)
    logger.close()

    assert logger.mode == "disabled"
    assert not (run.path / "wandb").exists()


def test_a_wandb_that_refuses_its_settings_does_not_stop_the_run(run: RunFolder) -> None:
    logger = WandbLogger(run, CONFIG, None, mode="offline", project="a/b?c")
    logger.log({"a": 1.0}, env_steps=1)
    logger.close()

    assert logger.status.startswith("W&B off, offline failed: ")
