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
    *(
        "network.hidden_sizes=[16]",
        "agent.learning_starts=48",
        "agent.batch_size=8",
        "agent.iteration_length=8",
    ),
    *("agent.buffer_size=90", "agent.n_step=3", "agent.target_every=8"),
    *("callbacks.checkpoints.every_steps=48", "~callbacks.evaluation"),
]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.slow
def test_a_run_that_stores_frames_once_equals_one_that_stores_stacks(here: Path) -> None:
    whole = train(RUN).run_dir
    frames = [*RUN, "agent.stacked_frames=4"]
    part = train([*frames, "+callbacks.stop={_target_: own_parts.StopAt, iteration: 7}"]).run_dir
    train([f"resume={part}", "+callbacks.stop={_target_: own_parts.StopAt, iteration: 99}"])

    assert read_rows(part) == read_rows(whole)
    ours, theirs = checkpoint_numbers(part), checkpoint_numbers(whole)
    differ = [name for name in theirs if ours[name] != theirs[name]]
    assert all("['segments']" in name or "['callbacks']" in name for name in differ), differ
    sizes = [
        sum(file.stat().st_size for file in (run / "replay").iterdir()) for run in (part, whole)
    ]
    assert sizes[0] < sizes[1]


def test_an_env_without_stacks_is_refused_in_one_line(here: Path) -> None:
    settings = [each for each in RUN if each != STACK]

    with pytest.raises(TrainingError, match=r"agent\.stacked_frames=4: no observation is a stack"):
        train([*settings, "agent.stacked_frames=4"])


@pytest.mark.slow
def test_pong_stores_frames_once(here: Path) -> None:
    pytest.importorskip("ale_py", reason="needs the extra: pip install -e '.[atari]'")
    pytest.importorskip("cv2", reason="needs the extra: pip install -e '.[atari]'")
    settings = [
        *("experiment=dqn_pong", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"),
        *("agent.buffer_size=300", "agent.learning_starts=100", "agent.batch_size=4"),
        *("total_steps=512", "network.hidden_size=16", "~callbacks.evaluation"),
    ]

    frames, whole = (
        train([*settings, f"agent.stacked_frames={n_frames}"]).run_dir for n_frames in (4, 1)
    )

    ours, theirs = (checkpoint_numbers(run) for run in (frames, whole))
    assert [name for name in theirs if ours[name] != theirs[name] and "segments" not in name] == []
    assert len(read_rows(frames)) == 8
