"""The reference runs: short trainings whose metrics.csv must not change when code moves.

``python tests/reference_runs.py`` records them again. Do that only for an intended change of the
numbers, and explain it in the commit.
"""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TESTS, door_command, only_run, read_rows, wait_until

from ml_pipeline.assembly import run

FOLDER = TESTS / "fixtures" / "reference"

_SMALL = ["agent.n_steps=32", "agent.n_minibatches=4", "agent.n_epochs=3", "n_envs=4"]
_EVERY = ["callbacks.evaluation.eval_every_steps=512", "callbacks.evaluation.n_episodes=2"]
_COMMON = ["seed=3", "env_seeds=adjacent", "device=cpu", "logger=none", "total_steps=1024", *_EVERY]
_TWO_WORKERS = ["vec_env.n_workers=2", "vec_env.start_method=spawn"]

RUNS: dict[str, list[str]] = {
    "cartpole_serial": ["env=cartpole", "vec_env=serial", *_SMALL],
    "acrobot_parallel": ["env=acrobot", "vec_env=parallel", *_TWO_WORKERS, *_SMALL],
    "pendulum_shared": [
        "experiment=pendulum",
        "vec_env=shared",
        *_TWO_WORKERS,
        *_SMALL,
        "agent.normalize_obs=true",
        "agent.scale_reward=true",
    ],
    "cartpole_memory": ["experiment=cartpole_memory", "vec_env=serial", *_SMALL],
    "crowded_keys": ["experiment=crowded_keys", "vec_env=serial", *_SMALL],
    "torch_cartpole": [
        "experiment=torch_cartpole",
        "agent.n_steps=16",
        "n_envs=16",
        "callbacks.evaluation.eval_every_steps=512",
    ],
    "cartpole_double": ["env=cartpole", "collector=double", "vec_env=parallel", *_SMALL],
    "cartpole_killed": [
        "env=cartpole",
        "vec_env=serial",
        *_SMALL,
        "total_steps=8192",
        "callbacks.checkpoints.every_steps=512",
    ],
}


def overrides(name: str) -> list[str]:
    return [*_COMMON, *RUNS[name]]


def train(name: str, folder: Path) -> list[dict[str, str]]:
    """Train a reference run in ``folder``; returns the rows of its metrics.csv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if name == "cartpole_killed":
            _train_until_killed(door_command(*overrides(name)), folder)
            run.train([f"resume={only_run(folder)}"])
        else:
            run.train(overrides(name))
    return read_rows(only_run(folder))


def _train_until_killed(command: list[str], folder: Path) -> None:
    """Start a training and kill it with SIGKILL once its first checkpoint exists."""
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        saved = "runs/*/*/checkpoints/latest.pt"
        wait_until(lambda: process.poll() is not None or any(folder.glob(saved)), seconds=100)
        assert process.poll() is None, "the run ended before it could be killed"
        process.kill()


def fingerprint() -> str:
    """A hash of the last bits of this machine's arithmetic.

    BLAS and torch choose their kernels by CPU, so the same program rounds differently elsewhere.
    """
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    digest = hashlib.sha256()
    for shape in ((4, 4, 64), (32, 64, 64), (128, 64, 2), (64, 128, 64), (16, 6, 64)):
        left = generator.standard_normal(shape[:2]).astype(np.float32)
        right = generator.standard_normal(shape[1:]).astype(np.float32)
        digest.update((left @ right).tobytes())
        digest.update((torch.from_numpy(left) @ torch.from_numpy(right)).numpy().tobytes())
        digest.update(np.tanh(left).tobytes() + np.exp(left).tobytes())
        tensor = torch.from_numpy(left)
        digest.update((tensor.tanh() + tensor.exp() + tensor.sigmoid()).numpy().tobytes())
        digest.update(np.float32(left.mean()).tobytes() + np.float32(left.var()).tobytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return {"fingerprint": fingerprint(), **versions}


def record() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            rows = train(name, Path(folder))
        names = list(dict.fromkeys(key for row in rows for key in row))
        with (FOLDER / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{name}: {len(rows)} iterations")
    (FOLDER / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")


if __name__ == "__main__":
    record()
