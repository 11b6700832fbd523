"""Loggers: metrics.csv is complete at any time, and W&B never blocks or stops a run."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
import wandb
from conftest import REPOSITORY, Capture, children_of, read_rows, small, wait_until

from ml_pipeline.assembly.run import train
from ml_pipeline.runs.loggers import (
    CsvLogger,
    WandbLogger,
    has_wandb_key,
    read_columns,
    read_metrics,
)
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

CONFIG = {"env_name": "CartPole-v1", "agent_name": "ppo", "agent": {"gamma": 0.9}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path / "run")


def new_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.make()
    return run


def test_new_metric_adds_a_column_and_each_row_is_readable_at_once(run: RunFolder) -> None:
    logger = CsvLogger(run.metrics)
    rows = [{"a": 1.0}, {"a": 2.0, "b": 5.0}, {"b": 6.0}]

    for number, row in enumerate(rows, start=1):
        logger.log(row, env_steps=10 * number)
        assert len(read_rows(run.path)) == number
    logger.close()

    assert read_rows(run.path) == [
        {"env_steps": "10", "a": "1.0", "b": ""},
        {"env_steps": "20", "a": "2.0", "b": "5.0"},
        {"env_steps": "30", "a": "", "b": "6.0"},
    ]


def test_resume_drops_rows_after_the_checkpoint_and_a_truncated_row(run: RunFolder) -> None:
    run.metrics.write_text("env_steps,a\n10,1.0\n20,2.0\n30,3.0\n4")

    logger = CsvLogger(run.metrics, from_env_steps=20)
    logger.begin()
    logger.log({"a": 9.0}, env_steps=30)
    logger.close()

    assert [tuple(row.values()) for row in read_rows(run.path)] == [
        ("10", "1.0"),
        ("20", "2.0"),
        ("30", "9.0"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "env_steps,a,b\n10,1.0,\n20,,nan\n30,-inf,2e-3\n",
        "env_steps,a,b\n10,1.0,5\n20,2.0,6\n3",
        'env_steps,a,"b"\n10,"1.0",\n20,,7\n',
        "env_steps,a,b\r\n10,1.0,\r\n20,2.0,3\r\n",
        "env_steps,b\n10,1.0\n",
        "env_steps,a,b\n",
        "",
    ],
    ids=["missing and nan", "cut", "quoted", "windows", "one column", "no rows", "empty"],
)
def test_columns_are_those_of_the_rows(run: RunFolder, text: str) -> None:
    run.metrics.write_text(text, newline="")

    columns = read_columns(run.metrics, {"env_steps", "a", "b"})

    rows = read_metrics(run.metrics)
    assert columns.first_row == (rows[0] if rows else {})
    for name in columns.first_row:
        cells = [row[name] for row in rows]
        values = [float(cell or "nan") for cell in cells]
        np.testing.assert_array_equal(columns.read[name].values, values)
        assert columns.read[name].measured.tolist() == [cell != "" for cell in cells]


@pytest.mark.parametrize(
    "body",
    ["10,1.0\n20,2.0,3.0,4.0\n", "x,1.0,2.0\n", "10,1.0,y\n", ",1.0,2.0\n", f"{10**400},1.0,2.0\n"],
)
def test_damaged_columns_are_named(run: RunFolder, body: str) -> None:
    run.metrics.write_text("env_steps,a,b\n" + body)

    with pytest.raises(RunFolderError, match=r"metrics\.csv is damaged: "):
        read_columns(run.metrics, {"env_steps", "a", "b"})


def test_without_a_key_wandb_works_offline_and_says_how_to_upload(
    here: Path, capsys: Capture
) -> None:
    result = train([*small(logger="wandb", total_steps=32), "vec_env=serial"])

    offline = list((result.run_dir / "wandb").glob("offline-run-*"))
    assert len(offline) == 1
    assert offline[0].name.endswith(result.run_dir.name)
    # W&B's own process writes the file.
    wait_until(lambda: any(path.stat().st_size for path in offline[0].glob("*.wandb")))
    out = capsys.readouterr().out
    assert f"-m wandb sync {result.run_dir}/wandb/offline-*\n" in out


@pytest.mark.parametrize("at_once", [True, False], ids=["at the same time", "one by one"])
def test_wandb_runs_of_one_process_have_their_own_ids_and_folders(
    at_once: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's process keeps the working directory of the first run."""
    with ExitStack() as stack:
        for name in ("first", "second"):
            (here / name).mkdir()
            monkeypatch.chdir(here / name)
            logger = WandbLogger(new_run(Path(f"run_{name}")), CONFIG, None, mode="offline")
            stack.callback(logger.close)
            assert logger.wandb_run.id == f"run_{name}"
            if not at_once:
                stack.close()

    pattern = "{0}/run_{0}/wandb/offline-run-*/run-run_{0}.wandb"
    for name in ("first", "second"):
        wait_until(lambda name=name: len(list(here.glob(pattern.format(name)))) == 1, 20)


# A process that uses W&B as a run does. With an argument it waits for a line of input.
LOGGING = """
import sys
from pathlib import Path
from ml_pipeline.runs.loggers import CsvLogger, WandbLogger
from ml_pipeline.runs.run_folder import RunFolder

run = RunFolder(Path(sys.argv[1]))
config = {"env_name": "CartPole-v1", "agent_name": "ppo"}
loggers = [CsvLogger(run.metrics), WandbLogger(run, config, None, timeout_seconds=3)]
print(loggers[1].status, loggers[1].hint, sep="; ", flush=True)
if sys.argv[2:]:
    input()
for env_steps in range(200):
    for logger in loggers:
        logger.log({"a": 1.0}, env_steps=env_steps)
for logger in loggers:
    logger.close()
print(loggers[1].status)
"""


def start_logging(run: RunFolder, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    # W&B's own variables lead to the W&B service of the test process.
    inherited = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "-c", LOGGING, str(run.path), *arguments],
        cwd=REPOSITORY,
        env={**inherited, **environment},
        text=True,
        **pipes,
    )


def output_of(process: subprocess.Popen[str], run: RunFolder) -> str:
    """The output of a process that must have succeeded and logged every row."""
    stdout, stderr = process.communicate("\n", timeout=60)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stdout + stderr
    assert len(read_rows(run.path)) == 200
    return stdout


def local_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "refused"])
@pytest.mark.slow
def test_without_a_server_wandb_works_offline(run: RunFolder, listens: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        url = local_url(server.getsockname()[1])
        process = start_logging(run, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=url)
        output = output_of(process, run)

    assert "W&B offline, its server does not answer; upload later with" in output


@pytest.mark.slow
def test_with_a_server_that_is_not_wandb_it_works_offline(run: RunFolder) -> None:
    # Its handler answers every request with an error.
    handler = http.server.BaseHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = local_url(server.server_address[1])
        process = start_logging(run, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=url)
        output = output_of(process, run)
        server.shutdown()

    assert "W&B offline, online failed: " in output


@pytest.mark.slow
def test_without_a_key_wandb_never_contacts_the_server(run: RunFolder) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        process = start_logging(run, WANDB_BASE_URL=local_url(server.getsockname()[1]))
        output_of(process, run)

        with pytest.raises(BlockingIOError):  # no connection is waiting
            server.accept()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_training_ends_without_losing_a_row_if_the_wandb_process_dies_or_hangs(
    number: signal.Signals, run: RunFolder
) -> None:
    process = start_logging(run, "wait")
    assert process.stdout is not None
    assert "W&B offline" in process.stdout.readline()

    (service,) = children_of(process.pid)
    os.kill(service, number)

    assert re.search(r"W&B (stopped at env step|did not finish)", output_of(process, run))


def test_key_is_found_in_the_environment_and_in_netrc(
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


def test_wandb_run_has_the_fields_that_comparisons_need_also_after_a_resume(run: RunFolder) -> None:
    labels = {"name": "base", "notes": "first try", "tags": ["a"]}
    for labelled, sweep, group, expected in (
        ({}, None, None, "CartPole-v1-ppo"),
        ({}, "morning", None, "morning"),
        (labels, "morning", "mine", "mine"),
    ):
        config = {**CONFIG, **labelled}
        logger = WandbLogger(run, config, sweep, mode="offline", group=group, tags=["b"])
        described = logger.wandb_run
        logger.close()

        assert logger.mode == "offline"
        assert described.group == expected
        assert described.tags == ("CartPole-v1", "ppo", *labelled.get("tags", ()), "b")
        assert described.job_type == "train"
        assert described.id == run.name
        assert described.name == labelled.get("name", run.name)
        assert described.notes == labelled.get("notes")
        assert described.config["agent"] == {"gamma": 0.9}


@pytest.mark.parametrize("given", [{}, {"project": "mine", "group": "ours", "tags": ["b"]}])
def test_wandb_variables_replace_defaults_but_not_what_the_config_names(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run: RunFolder
) -> None:
    variables = {"PROJECT": "thesis", "ENTITY": "lab", "RUN_GROUP": "night", "NAME": "try"}
    for name, value in {**variables, "TAGS": "x,ppo,y", "NOTES": "slow"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = {**CONFIG, "name": "base", "notes": "fast"} if given else CONFIG

    logger = WandbLogger(run, config, "morning", mode="offline", **given)
    described = logger.wandb_run
    logger.close()

    assert (described.project, described.entity) == (given.get("project", "thesis"), "lab")
    assert described.group == given.get("group", "night")
    assert described.name == config.get("name", "try")
    assert described.notes == config.get("notes", "slow")
    assert described.tags == ("CartPole-v1", "ppo", *given.get("tags", ()), "x", "y")
    assert described.id == run.name


def test_wandb_mode_of_the_environment_is_respected(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")

    logger = WandbLogger(run, CONFIG, None)
    logger.log({"a": 1.0}, env_steps=1)
    logger.close()

    assert logger.mode == "disabled"
    assert not (run.path / "wandb").exists()


def test_project_that_wandb_refuses_does_not_stop_the_run(run: RunFolder) -> None:
    logger = WandbLogger(run, CONFIG, None, mode="offline", project="a/b?c")
    logger.log({"a": 1.0}, env_steps=1)
    logger.log_histograms({"a": np.zeros(3)}, env_steps=1)
    logger.log_file(run.metrics, kind="checkpoint", env_steps=1)
    logger.close()

    assert logger.status.startswith("W&B off, offline failed: ")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("WANDB_MODE", "foo", "W&B off: "),
        pytest.param("WANDB_BASE_URL", "notaurl", "W&B off: ", marks=pytest.mark.slow),
        pytest.param("WANDB_DISABLED", "true", "W&B disabled", marks=pytest.mark.slow),
    ],
)
def test_environment_that_wandb_refuses_does_not_stop_the_run(
    run: RunFolder, name: str, value: str, status: str
) -> None:
    assert status in output_of(start_logging(run, **{name: value}), run)
