"""Two hosts train together; a host that dies and a cut cable stop the run, which then resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hosts as two_hosts
import pytest
from hosts import Hosts, Launched, wait_for
from started_ranks import OPTIONS, TRAIN, run_folder

from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder

WORDS = [TRAIN, *OPTIONS, "vec_env=serial"]
CHECKPOINT = "*/*/checkpoints/latest.pt"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    reason = two_hosts.why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    logs = tmp_path / "logs"
    logs.mkdir()
    with two_hosts.running(logs) as made:
        yield made


def all_ended(launched: list[Launched], seconds: float = 180.0) -> list[tuple[int, str]]:
    return [each.ended(seconds) for each in launched]


def assert_resumes(hosts: Hosts, runs: Path, *, c10d: bool) -> None:
    run = run_folder(runs)
    done = int(load_checkpoint(RunFolder.open(run), LATEST)["env_steps"])
    launched = hosts.start(TRAIN, f"resume={run}", f"total_steps={done + 512}", c10d=c10d)
    (code, output), (other_code, _) = all_ended(launched)

    assert (code, other_code) == (0, 0), output
    assert f"resumed at env step {done:,} in the middle of its episodes" in output
    assert f"finished at env step {done + 512:,} of {done + 512:,}" in output


@pytest.mark.parametrize(
    ("dead", "line"),
    [
        ("b", "rank 1 on nodeb: killed, cut off or hanging"),
        ("a", "rank 0 on nodea: killed or cut off; the store of torchrun on 10.213.7.1"),
    ],
)
def test_killed_host_is_named_by_the_other_and_the_run_resumes(
    dead: str, line: str, hosts: Hosts, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    launched = hosts.start(*WORDS, "total_steps=1e7", f"run_root={runs}")
    wait_for(runs, CHECKPOINT)
    hosts.kill(dead)
    ended = all_ended(launched, 60.0)

    code, output = ended["ba".index(dead)]
    assert code == 1, output
    assert line in output
    assert hosts.pids("a") + hosts.pids("b") == []
    assert_resumes(hosts, runs, c10d=True)


def test_cut_link_stops_both_hosts_in_time_and_the_run_resumes(
    hosts: Hosts, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    options = ["total_steps=1e7", "rank_timeout_seconds=8", f"run_root={runs}"]
    launched = hosts.start(*WORDS, *options, c10d=False)
    wait_for(runs, CHECKPOINT)
    hosts.set_link("b", "down")
    deadline = time.monotonic() + 8.0 + 40.0  # torchrun itself ends slowly on a busy machine
    ended = [each.ended(deadline - time.monotonic()) for each in launched]

    assert [code for code, _ in ended] == [1, 1]
    assert "rank 1 on nodeb: killed, cut off or hanging" in ended[0][1]
    assert "rank 0 on nodea: killed or cut off" in ended[1][1]
    assert hosts.pids("a") + hosts.pids("b") == []
    hosts.set_link("b", "up")
    assert_resumes(hosts, runs, c10d=False)


def test_restart_after_a_dead_rank_resumes_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["--max-restarts=1", *WORDS, "total_steps=2048", f"run_root={runs}"]
    launched = hosts.start(*words, c10d=True)
    wait_for(runs, CHECKPOINT)
    os.kill(hosts.rank_pid("b"), signal.SIGKILL)
    (code, output), (other_code, _) = all_ended(launched)

    assert (code, other_code) == (0, 0), output
    assert f"restart 1 of torchrun: resuming {run_folder(runs)} from env step 512" in output
    assert "finished at env step 2,048 of 2,048" in output


def test_host_that_died_joins_again_with_the_same_command(hosts: Hosts, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["--max-restarts=1", *WORDS, "total_steps=2048", f"run_root={runs}"]
    first, dead = hosts.start(*words, c10d=False)
    wait_for(runs, CHECKPOINT)
    hosts.kill("b")
    dead.ended(40.0)
    (again,) = hosts.start(*words, c10d=False, on="b")
    (code, output), (other_code, _) = all_ended([first, again])

    assert (code, other_code) == (0, 0), output
    assert "rank 1 on nodeb: killed, cut off or hanging" in output
    assert f"restart 1 of torchrun: resuming {run_folder(runs)} from env step 512" in output
    assert "finished at env step 2,048 of 2,048" in output
