"""Runs with stacked frames: storing each frame once changes nothing but the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import read_rows
from stopped_runs import checkpoint_numbers

from ml_pipeline.assembly.run import train
from ml_pipeline.training.checks import TrainingError

STACK = "+env.wrappers.stack={_target_: gymnasium.wrappers.FrameStackObservation, stack_size: 4}"
RUN = [
    *("agent=dqn", "env.target=tiny_envs.FramesEnv", STACK, "+env.kwargs.shape=[8,8]"),
    *("n_envs=3", "vec_env=serial", "device=cpu", "logger=none", "total_steps=288"),
    *("network.hidden_sizes=[16]", "agent.learning_starts=48", "agent.batch_size=8"),
    *("agent.iteration_length=8", "agent.buffer_size=90", "agent.n_step=3", "agent.target_every=8"),
    *("callbacks.checkpoints.every_steps=48", "~callbacks.evaluation"),
]
PONG = [
    *("experiment=dqn_pong", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"),
    *("agent.buffer_size=300", "agent.learning_starts=100", "agent.batch_size=4"),
    *("total_steps=512", "network.hidden_size=16", "~callbacks.evaluation"),
]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [RUN, PONG], ids=["frames", "Pong"])
def test_a_run_that_stores_frames_once_equals_one_that_stores_stacks(
    here: Path, settings: list[str]
) -> None:
    for package in ("ale_py", "cv2") if settings is PONG else ():
        pytest.importorskip(package, reason="needs the extra: pip install -e '.[atari]'")

    whole, frames = (
        train([*settings, f"agent.stacked_frames={n_frames}"]).run_dir for n_frames in (1, 4)
    )

    assert read_rows(frames) == read_rows(whole)
    assert checkpoint_numbers(frames) == checkpoint_numbers(whole)
    assert size_of(frames / "replay") < size_of(whole / "replay")


def test_an_env_without_stacks_is_refused_in_one_line(here: Path) -> None:
    settings = [each for each in RUN if each != STACK]

    with pytest.raises(TrainingError, match=r"agent\.stacked_frames=4: no observation is a stack"):
        train([*settings, "agent.stacked_frames=4"])
