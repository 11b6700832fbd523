"""Stacked frames in the replay buffer: each stored once, and restored exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tiny_envs import FramesEnv

from ml_pipeline.algorithms.replay import files as replay_files
from ml_pipeline.algorithms.replay.audit import audit
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.files import (
    find_lost,
    load_rows,
    read_replay,
    rows_of,
    write_replay,
)
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.env_batch import EnvStep, FinalObservation

N_ENVS, CAPACITY, N_FRAMES = 3, 20 * 3, 4


def made(space: gym.Space[Any], **options: Any) -> ReplayBuffer:
    reader, distribution = ObservationReader(space), Categorical(spaces.Discrete(2))
    settings: dict[str, Any] = {"n_step": 1, "gamma": 0.9, "device": torch.device("cpu"), **options}
    return ReplayBuffer(CAPACITY, N_ENVS, reader, distribution, **settings)


def stacked(with_vector: bool = False) -> gym.Env[Any, Any]:
    return gym.wrappers.FrameStackObservation(FramesEnv(with_vector=with_vector), N_FRAMES)


def play(buffers: list[ReplayBuffer], n_rows: int, *, seed: int = 0, **env: Any) -> Iterator[int]:
    """Write the same steps to all buffers; yields after each row."""
    envs: Any = SyncVectorEnv(
        [lambda: stacked(**env)] * N_ENVS, autoreset_mode=AutoresetMode.SAME_STEP
    )
    reader = ObservationReader(envs.single_observation_space)
    obs, _ = envs.reset(seed=seed)
    for buffer in buffers:
        buffer.end_episodes()
        buffer.begin(reader.read(obs), None)
    for row in range(n_rows):
        obs, reward, terminated, truncated, infos = envs.step(np.zeros(N_ENVS, int))
        cut = np.flatnonzero(truncated & ~terminated).tolist()
        finals = [FinalObservation(i, reader.read(infos["final_obs"][i]), None) for i in cut]
        action = torch.full((N_ENVS,), row % 2)
        for buffer in buffers:
            step = EnvStep(reader.read(obs), None, reward, terminated, truncated, finals=finals)
            buffer.write(action, step)
        yield row


def tensors(batch: Any) -> list[torch.Tensor]:
    inputs = [batch.inputs.obs, batch.next_inputs.obs]
    leaves = [leaf for obs in inputs for leaf in (obs.values() if isinstance(obs, dict) else [obs])]
    return [*leaves, batch.action, batch.reward, batch.discount, batch.weight]


def all_rows(buffer: ReplayBuffer) -> torch.Tensor:
    """The indices of all transitions that can be drawn, oldest first."""
    number = torch.arange(buffer.first_drawn * N_ENVS, buffer.n_written * N_ENVS)
    return number % buffer.size


def assert_same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    assert len(one) == len(other)
    index = [all_rows(each) for each in (one, other)]
    weight = torch.ones(len(one))
    batches = [each.batch(rows, weight) for each, rows in zip((one, other), index, strict=True)]
    assert all(map(torch.equal, *map(tensors, batches)))
    if one.tree is not None and other.tree is not None:
        ours, theirs = one.tree.priorities, other.tree.priorities
        assert torch.equal(ours[index[0]], theirs[index[1]])
        assert ours.count_nonzero() == theirs.count_nonzero() == len(one)  # nothing else is drawn
        error = torch.linspace(0.1, 2.0, len(one))
        for each, rows in zip((one, other), index, strict=True):
            each.prioritise(rows[::5], error[::5])
    else:
        uniform = torch.rand(50, generator=torch.Generator().manual_seed(len(one)))
        drawn = [tensors(each.sample(uniform)[0]) for each in (one, other)]
        assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize(
    ("n_step", "with_vector", "exponent"), [(1, False, 0.0), (3, True, 0.0), (3, False, 0.6)]
)
def test_batches_equal_those_of_whole_observations(
    n_step: int, with_vector: bool, exponent: float
) -> None:
    space = stacked(with_vector).observation_space
    options = {"n_step": n_step, "priority_exponent": exponent}
    frames, whole = made(space, stacked_frames=N_FRAMES, **options), made(space, **options)

    for _ in play([frames, whole], 100, with_vector=with_vector):  # five times around the ring
        assert_same(frames, whole)

    assert frames.n_rows == whole.n_rows + N_FRAMES - 1
    name = "image" if with_vector else ""
    assert frames.tables[f"obs {name}"].shape == (frames.n_rows * N_ENVS, 2, 3)
    assert frames.tables[f"obs {name}"].dtype == torch.uint8


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_in_files_and_new_episodes_keep_their_stacks(n_step: int) -> None:
    space = stacked().observation_space
    options = {"n_step": n_step, "priority_exponent": 0.6}
    frames, whole = made(space, stacked_frames=N_FRAMES, **options), made(space, **options)
    segments: list[tuple[int, int, dict[str, Any]]] = []
    for row in play([frames, whole], 53):
        if row % 7 == 0 or row == 52:
            first = max(segments[-1][1] if segments else 0, frames.oldest)
            segments.append((first, frames.n_written, rows_of(frames, first, frames.n_written)))
    head = frames.windows.observed(torch.arange(N_ENVS) + frames.place(frames.n_written).start)

    restored = made(space, stacked_frames=N_FRAMES, **options)
    restored.load_state_dict(frames.state_dict())
    restored.begin({"": head["obs "].numpy()}, None)
    for first, last, rows in segments:
        load_rows(restored, first, last, rows)

    uniform = torch.rand(200, generator=torch.Generator().manual_seed(0))
    drawn = [tensors(each.sample(uniform)[0]) for each in (restored, frames)]
    assert all(map(torch.equal, *drawn))
    for _ in play([restored, whole], 30, seed=9):  # the envs start new episodes
        assert_same(restored, whole)


@pytest.mark.parametrize("lost", [[], [0], [1], [3], [1, 3]], ids=str)
def test_stacks_after_a_lost_file_are_complete(
    lost: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, files = stacked().observation_space, LargeFiles(RunFolder(tmp_path), salvages=True)
    buffer = made(space, stacked_frames=N_FRAMES, priority_exponent=0.6)
    for _ in play([buffer], 30):
        pass
    monkeypatch.setattr(replay_files, "_FILE_BYTES", 6 * buffer.row_bytes)  # rows 7 to 30
    write_replay(files, buffer)
    last_lost = max((buffer.segments[number]["last"] for number in lost), default=buffer.oldest)
    for number in lost:
        (tmp_path / "replay" / buffer.segments[number]["name"]).unlink()
    head = buffer.windows.observed(torch.arange(N_ENVS) + buffer.place(30).start)

    restored = made(space, stacked_frames=N_FRAMES, priority_exponent=0.6)
    restored.load_state_dict(buffer.state_dict())
    restored.begin({"": head["obs "].numpy()}, None)
    read_replay(files, restored, lost=find_lost(files, restored))

    first = last_lost + N_FRAMES - 1
    assert restored.first_drawn == max(first, buffer.first_drawn)
    assert len(restored) == max(30 - first, 0) * N_ENVS
    assert audit(restored).fault == ""
    for row in range(first, 30):
        index = torch.arange(N_ENVS) + buffer.place(row).start
        ours, theirs = (each.windows.observed(index)["obs "] for each in (restored, buffer))
        assert torch.equal(ours, theirs)
    for _ in play([restored], 6, seed=9):
        assert audit(restored).fault == ""


def test_a_forgotten_row_is_not_drawn() -> None:
    buffer = made(stacked().observation_space, stacked_frames=N_FRAMES, priority_exponent=0.6)
    uniform = made(stacked().observation_space)
    for _ in play([buffer, uniform], 50):
        pass

    drawn = []
    for each in (buffer, uniform):
        each.forget_newest()
        index = each.sample(torch.linspace(0, 1, 1000)[:-1])[1]
        drawn.append(set(((index // N_ENVS - each.n_written) % each.n_rows - each.n_rows).tolist()))

    # Row -1 is the newest; row -20 was overwritten by the forgotten one.
    assert drawn == [set(range(-19, 0))] * 2
    assert len(buffer) == 19 * N_ENVS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda obs: obs[:, ::-1], "does not continue that of the step before"),
        (lambda obs: obs * np.uint8(0), "does not continue that of the step before"),
    ],
)
def test_observations_that_are_not_stacks_are_refused(change: Any, words: str) -> None:
    buffer = made(stacked().observation_space, stacked_frames=N_FRAMES)
    envs: Any = SyncVectorEnv([stacked] * N_ENVS)
    obs, _ = envs.reset(seed=0)
    buffer.begin({"": obs}, None)
    obs = envs.step(np.zeros(N_ENVS, int))[0]
    flags = np.zeros(N_ENVS, bool), np.zeros(N_ENVS, bool)

    step = EnvStep({"": change(obs)}, None, np.zeros(N_ENVS), *flags)
    with pytest.raises(TrainingError, match=words) as error:
        buffer.write(torch.zeros(N_ENVS), step)

    assert str(error.value).endswith("; agent.stacked_frames=1 stores whole observations")


def test_stacks_padded_with_zeros_are_refused() -> None:
    env = gym.wrappers.FrameStackObservation(FramesEnv(), N_FRAMES, padding_type="zero")
    buffer = made(env.observation_space, stacked_frames=N_FRAMES)
    first = np.stack([env.reset(seed=i)[0] for i in range(N_ENVS)])

    with pytest.raises(TrainingError, match="env 0 does not repeat its first frame"):
        buffer.begin({"": first}, None)


def test_an_observation_without_frames_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"stacked_frames=4: no observation is .* \[2, 3\]; "):
        made(FramesEnv().observation_space, stacked_frames=N_FRAMES)


def test_files_of_another_setting_are_refused() -> None:
    space = stacked().observation_space
    whole, frames = made(space), made(space, stacked_frames=N_FRAMES)
    for _ in play([whole], 5):
        pass
    frames.load_state_dict(whole.state_dict())

    with pytest.raises(ValueError, match="stacked_frames=4: 'obs ' has another shape"):
        load_rows(frames, 0, 5, rows_of(whole, 0, 5))
    with pytest.raises(ValueError, match="n_envs=3: the replay files have 6 envs"):
        load_rows(whole, 0, 1, rows_of(whole, 0, 2))
