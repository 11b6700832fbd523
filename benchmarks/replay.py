"""Memory of a replay buffer of Atari frames, and the cost of its batches, checkpoints and resumes.

    python benchmarks/replay.py
    python benchmarks/replay.py --transitions 100000 --folder /path/on/a/fast/disk

Fills a buffer with random frames of 84 x 84 bytes, stacked by four, as 8 envs would return them;
an episode is truncated every 1,000 steps. ``memory`` is measured by the operating system. The first
checkpoint saves all transitions, the next one those that are new. Times of writes and batches are
CPU time. The files stay in the page cache, so the time to resume is that of checking and copying
them. Batches of whole stacks come from a buffer of a tenth of the size.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.files import read_replay, write_replay
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.env_batch import EnvStep, FinalObservation

N_ENVS, N_FRAMES, SIDE, EPISODE = 8, 4, 84, 1_000


def made(n_transitions: int, stacked_frames: int) -> ReplayBuffer:
    space = spaces.Box(0, 255, (N_FRAMES, SIDE, SIDE), np.uint8)
    return ReplayBuffer(
        n_transitions,
        N_ENVS,
        ObservationReader(space),
        Categorical(spaces.Discrete(6)),
        n_step=1,
        gamma=0.99,
        device=torch.device("cpu"),
        stacked_frames=stacked_frames,
    )


class Game:
    """Random frames, stacked as ``FrameStackObservation`` stacks them."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._random = np.random.Generator(np.random.SFC64(0))
        self._buffer = buffer
        self._stack = np.repeat(self._frame(), N_FRAMES, axis=1)
        buffer.begin({"": self._stack}, None)

    def _frame(self) -> np.ndarray:
        data = self._random.bytes(N_ENVS * SIDE * SIDE)
        return np.frombuffer(data, np.uint8).reshape(N_ENVS, 1, SIDE, SIDE)

    def play(self, n_transitions: int) -> float:
        """Write transitions; returns the CPU time per row that the buffer needs."""
        no = np.zeros(N_ENVS, bool)
        action, reward = np.zeros(N_ENVS, np.int64), np.zeros(N_ENVS)
        seconds, n_rows = 0.0, n_transitions // N_ENVS
        for _ in range(n_rows):
            self._stack = np.concatenate([self._stack[:, 1:], self._frame()], axis=1)
            finals, is_cut = [], (self._buffer.n_written + 1) % EPISODE == 0
            if is_cut:
                finals = [FinalObservation(i, {"": self._stack[i]}, None) for i in range(N_ENVS)]
                self._stack = np.repeat(self._frame(), N_FRAMES, axis=1)
            start = time.process_time()
            cut = np.full(N_ENVS, is_cut)
            self._buffer.write(
                action, EnvStep({"": self._stack}, None, reward, no, cut, finals=finals)
            )
            seconds += time.process_time() - start
        return seconds / n_rows


def batch_seconds(buffer: ReplayBuffer) -> float:
    """CPU time of a batch of 32."""
    generator = torch.Generator().manual_seed(0)
    start = time.process_time()
    for _ in range(2_000):
        buffer.sample(torch.rand(32, generator=generator))
    return (time.process_time() - start) / 2_000


def resident_bytes() -> int:
    """Memory of this process, from Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def timed(function: Callable[..., object], *args: object) -> str:
    """Runs a function; returns its duration and CPU time in words."""
    start, start_cpu = time.perf_counter(), time.process_time()
    function(*args)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return f"{seconds:.1f} s ({cpu:.1f} s of CPU time)"


def save(run: RunFolder, buffer: ReplayBuffer) -> str:
    before = folder_bytes(run.replay)
    seconds = timed(write_replay, LargeFiles(run), buffer)
    return f"{(folder_bytes(run.replay) - before) / 1e9:.2f} GB, {seconds}"


def frames_once(run: RunFolder, n: int) -> dict[str, str]:
    """A buffer that stores each frame once, up to its second checkpoint, and its resume."""
    found = {}
    before = resident_bytes()
    buffer = made(n, N_FRAMES)
    game = Game(buffer)
    write = game.play(n)
    found["memory, each frame once"] = f"{(resident_bytes() - before) / 1e9:.2f} GB"
    found[f"write a step of {N_ENVS} envs"] = f"{write * 1e6:.0f} µs"
    found["batch of 32, each frame once"] = f"{batch_seconds(buffer) * 1e6:.0f} µs"
    found["first checkpoint"] = save(run, buffer)
    game.play(n // 10)
    found[f"next checkpoint, after {n // 10:,} env steps"] = save(run, buffer)
    state = buffer.state_dict()
    del buffer, game  # two of them might not fit into memory
    resumed = made(n, N_FRAMES)
    resumed.load_state_dict(state)
    found["resume"] = timed(read_replay, LargeFiles(run), resumed)
    return found


def whole_stacks(n: int) -> dict[str, str]:
    buffer = made(n // 10, 1)
    Game(buffer).play(n // 10)
    return {
        "memory, whole stacks (computed)": f"{buffer.row_bytes / N_ENVS * n / 1e9:.2f} GB",
        "batch of 32, whole stacks": f"{batch_seconds(buffer) * 1e6:.0f} µs",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = frames_once(RunFolder(Path(folder)), args.transitions)
    found |= whole_stacks(args.transitions)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{date.today()}, {machine}, {args.transitions:,} transitions")
    print("| measured | result |")
    print("|---|---|")
    for name, result in found.items():
        print(f"| {name} | {result} |")


if __name__ == "__main__":
    main()
