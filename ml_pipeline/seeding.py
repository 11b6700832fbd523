"""Seeds: every user of random numbers draws from its own stream.

Training env i gets ``first_env_seed(seed) + i``: a run with few envs replays the first envs of a
larger run, and runs with other seeds share no env. All other streams are unrelated to these and to
each other.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

_MAX_SEED = 2**31 - 1  # the range that NumPy, torch and Gymnasium all accept
# About _MAX_SEED divided by the golden ratio, whose multiples keep away from each other.
_SPREAD = 1_327_217_227


def first_env_seed(seed: int, *, env_steps: int = 0, is_adjacent: bool = False) -> int:
    """Seed of the first training env; a run resumed at ``env_steps`` must not replay its start.

    The first envs of the seeds s and s + d are at least 700 million / d apart, for d below 100,000.
    ``is_adjacent``: they are d apart, so runs with the seeds 1 and 2 share all envs but one each.
    """
    if env_steps > 0:
        return stream_seed(seed, f"envs resumed at {env_steps}")
    return seed if is_adjacent else seed * _SPREAD % _MAX_SEED


def stream_seed(seed: int, owner: str) -> int:
    """A seed for ``owner`` (any name): determined by ``seed``, unrelated between owners."""
    digest = hashlib.sha256(f"{seed}/{owner}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _MAX_SEED


def seed_global_generators(seed: int) -> None:
    """Seed Python, NumPy and torch: this package never draws from them, but user code may."""
    random.seed(stream_seed(seed, "python"))
    np.random.seed(stream_seed(seed, "numpy"))
    torch.manual_seed(stream_seed(seed, "torch"))


def set_generator_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Continue from ``state``; one of another kind of device only determines the new stream.

    The generators of CPU, CUDA and MPS are different algorithms, with states of different sizes.
    """
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
    else:
        digest = hashlib.sha256(state.numpy().tobytes()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") % _MAX_SEED)


def global_generators_state() -> dict[str, Any]:
    """The state of the global generators as plain data, for a checkpoint."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_global_generators_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
