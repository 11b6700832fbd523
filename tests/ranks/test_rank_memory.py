"""RankMemory: sums of real processes, and what they do if one of them is missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from ml_pipeline.ranks.shared_memory import MOST_BYTES, MemoryFile, RankMemory, new_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is used on Linux")

N_RANKS, N_SUMS = 3, 2_000
PROCESSES = multiprocessing.get_context("spawn")


def take_part(file: MemoryFile, rank: int, task: str, pipe: Any) -> None:
    """One rank; sends its pid, receives those of all, and sends its result."""
    pipe.send(os.getpid())
    memory = RankMemory(file, rank, pipe.recv(), timeout_seconds=0.9 if task == "silent" else 60.0)
    try:
        pipe.send(TASKS[task](memory, rank))
    except RuntimeError as error:
        pipe.send(str(error))


def parts_of(rank: int, dtype: Any) -> list[Any]:
    random = np.random.default_rng(rank)
    return [(100 * random.normal(size=1 + i % 50)).astype(dtype) for i in range(N_SUMS)]


def add_many(memory: RankMemory, rank: int) -> list[bytes]:
    sums = []
    for dtype in (np.float32, np.float64, np.int64):
        for part in parts_of(rank, dtype):
            memory.add(part)
            sums.append(part.tobytes())
    return sums


def exchange(memory: RankMemory, rank: int) -> list[Any]:
    small = memory.objects({"rank": rank, "text": "x" * 1_000 * rank})
    large = memory.objects(b"x" * (MOST_BYTES if rank == 1 else 1))
    return [small, large, memory.parts(np.array([rank, -rank])).max(0).tolist()]


def missing(memory: RankMemory, rank: int, leave: Any) -> str:
    memory.add(np.ones(3))
    if rank == 1:
        leave()
        time.sleep(20)
    memory.add(np.ones(3))
    return "no error"


def finish(memory: RankMemory, rank: int) -> list[float]:
    """Rank 0 waits for the others, which end as soon as they have the sum."""
    if rank:
        time.sleep(1.0)
    values = np.ones(2)
    memory.add(values)
    memory.leave()
    return values.tolist()


TASKS: dict[str, Any] = {
    "add": add_many,
    "exchange": exchange,
    "finish": finish,
    "left": lambda memory, rank: missing(memory, rank, memory.leave),
    "killed": lambda memory, rank: missing(
        memory, rank, lambda: os.kill(os.getpid(), signal.SIGKILL)
    ),
    "silent": lambda memory, rank: missing(memory, rank, lambda: None),
}


class Ranks:
    """Processes that do one task."""

    def __init__(self, task: str) -> None:
        file = new_file(N_RANKS)
        pairs = [PROCESSES.Pipe() for _ in range(N_RANKS)]
        self.pipes = [own for own, _ in pairs]
        self.processes = [
            PROCESSES.Process(target=take_part, args=(file, rank, task, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        pids = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(pids)
        self.file = file

    def result(self, rank: int) -> Any:
        assert self.pipes[rank].poll(30), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def end(self) -> None:
        self.file.close()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Any:
    started = Ranks(request.param)
    yield started
    started.end()


@pytest.mark.parametrize("ranks", ["add"], indirect=True)
def test_sums_are_those_of_all_ranks_in_their_order(ranks: Ranks) -> None:
    found = [ranks.result(rank) for rank in range(N_RANKS)]

    expected = []
    for dtype in (np.float32, np.float64, np.int64):
        for first, second, third in zip(*(parts_of(r, dtype) for r in range(N_RANKS)), strict=True):
            expected.append((first + second + third).tobytes())
    assert found == [expected] * N_RANKS


@pytest.mark.parametrize("ranks", ["exchange"], indirect=True)
def test_ranks_exchange_objects_unless_one_is_too_large(ranks: Ranks) -> None:
    objects = [{"rank": rank, "text": "x" * 1_000 * rank} for rank in range(N_RANKS)]
    for rank in range(N_RANKS):
        assert ranks.result(rank) == [objects, None, [2, 0]]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [("left", "a rank has left"), ("killed", "a rank was killed"), ("silent", "no answer for 1 s")],
    indirect=["ranks"],
)
def test_ranks_notice_that_another_one_is_missing(ranks: Ranks, reason: str) -> None:
    if reason == "a rank was killed":
        ranks.processes[1].join(20)  # as torchrun does

    assert [ranks.result(rank) for rank in (0, 2)] == [reason] * 2


@pytest.mark.parametrize("ranks", ["finish"], indirect=True)
def test_ranks_that_have_finished_are_not_missed(ranks: Ranks) -> None:
    waiting, *others = ranks.processes
    time.sleep(0.5)
    os.kill(waiting.pid or 0, signal.SIGSTOP)

    found = [ranks.result(rank) for rank in (1, 2)]
    for each in others:
        each.join(20)
    os.kill(waiting.pid or 0, signal.SIGCONT)

    assert [*found, ranks.result(0)] == [[N_RANKS, N_RANKS]] * N_RANKS


def own_files() -> set[str]:
    """The files of this package in shared memory; other tests may run at the same time."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("ml_pipeline")}


def test_ranks_that_are_killed_at_any_moment_leave_no_file() -> None:
    script = (
        "from ml_pipeline.ranks.shared_memory import new_file\n"
        "file = new_file(2)\n"
        "print('made', flush=True)\n"
        "input()\n"
        "file.opened()\n"
        "print('opened', flush=True)\n"
        "input()\n"
    )
    before = own_files()

    for moment in ("made", "opened"):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        while process.stdout.readline() != f"{moment}\n":
            process.stdin.write("\n")
            process.stdin.flush()
        assert own_files() <= before
        process.kill()
        process.communicate()
        assert own_files() <= before


def test_file_of_another_process_is_refused() -> None:
    file = new_file(2)

    with pytest.raises(OSError, match="another process"):
        file._replace(token=bytes(16)).opened()
    assert len(file.opened()) > 4 * MOST_BYTES
    file.close()
    with pytest.raises(OSError, match="No such file"):
        file.opened()
