"""ReplayBuffer and SumTree: windows, ends, the write head, priorities, and rows on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

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
from ml_pipeline.algorithms.replay.priorities import SumTree
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.env_batch import EnvStep, FinalObservation, Seen

CPU = torch.device("cpu")
GAMMA = 0.5


def made(capacity: int, n_envs: int = 1, **options: Any) -> ReplayBuffer:
    space = spaces.Box(-1e6, 1e6, (1,), np.float32)
    settings: dict[str, Any] = {"n_step": 1, "gamma": GAMMA, "device": CPU, **options}
    reader, distribution = ObservationReader(space), Categorical(spaces.Discrete(100))
    return ReplayBuffer(capacity, n_envs, reader, distribution, **settings)


def obs(*values: float) -> dict[str, Any]:
    return {"": np.array(values, np.float32)[:, None]}


def fill(buffer: ReplayBuffer, n_rows: int, ends: dict[int, str] | None = None) -> None:
    """Row t of env i observes 100 i + t, acts t and has the reward t; an end resets to 1000 + t."""
    ends, n_envs = ends or {}, buffer.n_envs
    buffer.begin(obs(*(100.0 * i for i in range(n_envs))), None)
    for t in range(n_rows):
        end, seen = ends.get(t), [100.0 * i + t + 1 for i in range(n_envs)]
        finals = []
        if end == "truncated":
            one = [{"": np.array([value], np.float32)} for value in seen]
            finals = [FinalObservation(i, leaves, None) for i, leaves in enumerate(one)]
        if end is not None:
            seen = [1000.0 + t] * n_envs
        flags = [np.full(n_envs, end == name) for name in ("terminated", "truncated")]
        action = torch.full((n_envs,), t)
        reward = np.full(n_envs, float(t))
        buffer.write(action, EnvStep(obs(*seen), None, reward, *flags, finals=finals))


def transitions(buffer: ReplayBuffer) -> dict[int, tuple[float, float, float, float]]:
    """By action: observation, reward, next observation and discount of every transition drawn."""
    uniform = torch.linspace(0, 1, 400)[:-1]
    batch = buffer.sample(uniform).batch
    rows = zip(
        batch.action.tolist(),
        batch.inputs.obs.flatten().tolist(),  # type: ignore[union-attr]
        batch.reward.tolist(),
        batch.next_inputs.obs.flatten().tolist(),  # type: ignore[union-attr]
        batch.discount.tolist(),
        strict=True,
    )
    return {int(action): rest for action, *rest in rows}  # type: ignore[misc]


def test_the_next_observation_is_the_true_successor_never_that_of_a_reset() -> None:
    buffer = made(10)

    fill(buffer, 5, ends={1: "terminated", 3: "truncated"})

    assert {a: v[2:] for a, v in transitions(buffer).items()} == {
        0: [1.0, GAMMA],
        1: [1001.0, 0.0],  # terminated: the next value does not count
        2: [3.0, GAMMA],
        3: [4.0, GAMMA],  # truncated: bootstraps from its final observation
        4: [5.0, GAMMA],
    }


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_full_ring_holds_the_newest_rows_and_nothing_crosses_the_write_head(n_envs: int) -> None:
    buffer = made(4 * n_envs, n_envs, n_step=3)

    fill(buffer, 11)

    drawn = transitions(buffer)
    assert len(buffer) == 4 * n_envs
    assert sorted(drawn) == [7, 8, 9, 10]
    # 3 rewards from row 7, and only those up to the write head from rows 9 and 10.
    assert drawn[7][1] == 7 + 0.5 * 8 + 0.25 * 9
    assert drawn[9][1:] == [9 + 0.5 * 10, drawn[10][2], 0.25]
    assert drawn[10][1] == 10
    assert drawn[10][2] % 100 == 11
    assert drawn[10][3] == 0.5


def test_a_window_of_n_steps_stops_at_the_first_end() -> None:
    buffer = made(10, n_step=3)

    fill(buffer, 6, ends={1: "terminated", 3: "truncated"})

    drawn = transitions(buffer)
    assert drawn[0][1:] == [0 + 0.5 * 1, 1001.0, 0.0]
    assert drawn[2][1:] == [2 + 0.5 * 3, 4.0, 0.25]
    assert drawn[3][1:] == [3.0, 4.0, 0.5]


def test_final_observations_are_kept_as_long_as_their_rows() -> None:
    buffer = made(5)

    fill(buffer, 300, ends=dict.fromkeys(range(300), "truncated"))

    assert {a: v[2] for a, v in transitions(buffer).items()} == {
        t: t + 1.0 for t in range(295, 300)
    }
    assert len(buffer.finals) == 64  # the room of overwritten rows is used again


def test_new_episodes_after_a_resume_count_as_a_truncation() -> None:
    buffer = made(10)
    fill(buffer, 3)

    buffer.end_episodes()
    buffer.begin(obs(555.0), None)
    flags = np.zeros(1, bool), np.zeros(1, bool)
    buffer.write(torch.tensor([3]), EnvStep(obs(556.0), None, np.ones(1), *flags))

    drawn = transitions(buffer)
    assert drawn[2][2:] == [3.0, GAMMA]  # not 555
    assert drawn[3] == [555.0, 1.0, 556.0, GAMMA]


def test_rows_can_be_saved_in_parts_and_put_back() -> None:
    ends = {2: "truncated", 5: "terminated", 8: "truncated"}
    buffer, restored = (made(12, 2, n_step=2, priority_exponent=0.5) for _ in range(2))
    fill(buffer, 4, ends)
    parts = [(0, 3)]
    saved = [rows_of(buffer, 0, 3)]
    for t in range(4, 11):  # rows 0 to 3 leave the ring
        end = ends.get(t)
        finals = []
        if end == "truncated":
            finals = [FinalObservation(i, {"": np.float32([t])}, None) for i in range(2)]
        flags = [np.full(2, end == name) for name in ("terminated", "truncated")]
        step = EnvStep(obs(t, t), None, np.full(2, t * 1.0), *flags, finals=finals)
        buffer.write(torch.full((2,), t), step)
    for first, last in ((3, 7), (7, 11)):
        parts.append((max(first, buffer.oldest), last))
        saved.append(rows_of(buffer, *parts[-1]))
    buffer.prioritise(torch.arange(4), torch.arange(4.0))

    restored.load_state_dict(buffer.state_dict())
    for (first, last), rows in zip(parts, saved, strict=True):
        load_rows(restored, first, last, rows)
    restored.begin(obs(10, 10), None)

    uniform = torch.rand(500, generator=torch.Generator().manual_seed(0))
    ours, theirs = buffer.sample(uniform, beta=0.4), restored.sample(uniform, beta=0.4)
    assert torch.equal(ours[1], theirs[1])
    for one, other in zip(ours[0], theirs[0], strict=True):
        one, other = (x.obs if isinstance(x, tuple) else x for x in (one, other))
        assert torch.equal(one, other)


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_a_cleared_buffer_draws_only_what_follows(exponent: float) -> None:
    buffer = made(8, n_step=2, priority_exponent=exponent)
    fill(buffer, 6, ends={3: "truncated"})

    buffer.clear()
    assert len(buffer) == 0
    flags = np.zeros(1, bool), np.zeros(1, bool)
    for t in (6, 7):
        step = EnvStep(obs(t + 1), None, np.full(1, float(t)), *flags)
        buffer.write(torch.tensor([t]), step)

    assert transitions(buffer) == {
        6: [6.0, 6.0 + GAMMA * 7.0, 8.0, GAMMA**2],
        7: [7.0, 7.0, 8.0, GAMMA],
    }
    assert audit(buffer).fault == ""


@pytest.mark.parametrize("n_after", [0, 2])
def test_a_cleared_buffer_is_restored_from_its_files(tmp_path: Path, n_after: int) -> None:
    run = RunFolder(tmp_path)
    buffer, restored = made(8), made(8)
    fill(buffer, 3)
    write_replay(LargeFiles(run), buffer)
    buffer.clear()
    flags = np.zeros(1, bool), np.zeros(1, bool)
    for t in range(3, 3 + n_after):
        step = EnvStep(obs(t + 1), None, np.full(1, float(t)), *flags)
        buffer.write(torch.tensor([t]), step)
    write_replay(LargeFiles(run), buffer)

    restored.load_state_dict(buffer.state_dict())
    read_replay(LargeFiles(run), restored)

    restored.begin(obs(3.0 + n_after), None)
    assert len(restored) == n_after
    if n_after:
        assert transitions(restored) == transitions(buffer)


def test_an_interrupt_right_after_a_clear_leaves_an_empty_buffer() -> None:
    buffer = made(8)
    fill(buffer, 3)
    buffer.clear()

    buffer.forget_newest()

    assert len(buffer) == 0


def test_a_sum_tree_draws_in_proportion_and_never_an_empty_leaf() -> None:
    tree = SumTree(1000, CPU)
    priority = torch.zeros(1000)
    priority[[3, 500, 999]] = torch.tensor([1.0, 2.0, 5.0])

    tree.set(torch.arange(1000), priority)
    uniform = torch.rand(8000, generator=torch.Generator().manual_seed(0))
    drawn, counts = tree.draw(uniform).unique(return_counts=True)

    assert drawn.tolist() == [3, 500, 999]
    assert counts.tolist() == [1000, 2000, 5000]  # one from each of 8000 equal parts
    assert tree.draw(torch.tensor([1.0 - 1e-12], dtype=torch.float64)).tolist() == [999]


def test_a_sum_tree_depends_on_its_priorities_only() -> None:
    generator = torch.Generator().manual_seed(0)
    tree, loaded = SumTree(37, CPU), SumTree(37, CPU)
    for _ in range(50):
        index = torch.randint(37, (5,), generator=generator).unique()
        tree.set(index, torch.rand(len(index), generator=generator))

    loaded.load(tree.priorities)

    assert torch.equal(tree.total, loaded.total)
    assert tree.total.item() == pytest.approx(tree.priorities.sum().item())


def test_prioritised_replay_weighs_what_it_draws_more_often_less() -> None:
    buffer = made(10, priority_exponent=1.0)
    fill(buffer, 4)
    buffer.prioritise(torch.arange(4), torch.tensor([0.0, 1.0, 1.0, 2.0]))

    batch, index, _ = buffer.sample(torch.rand(4000), beta=1.0)

    share = torch.bincount(index, minlength=11)[:4] / 4000
    assert share.tolist() == pytest.approx([0.0, 0.25, 0.25, 0.5], abs=0.01)
    weights = {int(i): float(w) for i, w in zip(index, batch.weight, strict=True) if i > 0}
    assert weights[1] == pytest.approx(2 * weights[3], rel=1e-5)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("exponent", [0.0, 0.6])
def test_rows_that_a_tensor_env_inserts_equal_those_that_the_host_writes(
    n_step: int, exponent: float
) -> None:
    n_envs, options = 3, {"n_step": n_step, "priority_exponent": exponent, "has_masks": True}
    host, device = made(12, n_envs, **options), made(12, n_envs, on_device=True, **options)
    rng = np.random.default_rng(0)
    for buffer in (host, device):
        buffer.begin(obs(0.0, 1.0, 2.0), np.ones((n_envs, 100), dtype=bool))
    for t in range(30):
        terminated, truncated = rng.random((2, n_envs)) < 0.2
        reward, seen, final = rng.standard_normal((3, n_envs)).astype(np.float32)
        mask, final_mask = rng.random((2, n_envs, 100)) < 0.5
        finals = [
            FinalObservation(int(env), {"": final[env : env + 1]}, final_mask[env])
            for env in np.flatnonzero(truncated & ~terminated)
        ]
        action = rng.integers(100, size=n_envs)
        step = reward, terminated, truncated
        host.write(action, EnvStep(obs(*seen), mask, *step, finals=finals))
        shown = Seen({"": torch.from_numpy(seen[:, None])}, torch.from_numpy(mask), None)
        last = Seen({"": torch.from_numpy(final[:, None])}, torch.from_numpy(final_mask), None)
        tensors = map(torch.from_numpy, step)
        device.write(torch.from_numpy(action), EnvStep(shown.obs, shown.mask, *tensors, final=last))
        device.count_row()
        uniform = torch.rand(64, generator=torch.Generator().manual_seed(t))
        (batch, index, _), (other, other_index, _) = host.sample(uniform), device.sample(uniform)
        assert torch.equal(index, other_index)
        for one, two in zip(batch[1:3], other[1:3], strict=True):
            assert torch.equal(one, two)
        assert torch.equal(batch.next_inputs.obs, other.next_inputs.obs)  # type: ignore[arg-type]
        assert torch.equal(batch.next_inputs.action_mask, other.next_inputs.action_mask)  # type: ignore[arg-type]
        assert torch.equal(batch.discount, other.discount)
        for buffer in (host, device):
            buffer.prioritise(index, uniform)
    saved = [rows_of(buffer, host.oldest, host.n_written) for buffer in (host, device)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    restored = made(12, n_envs, on_device=True, **options)
    restored.load_state_dict(device.state_dict())
    load_rows(restored, host.oldest, host.n_written, saved[1])
    restored.begin(obs(*seen), mask)
    batch, other = restored.sample(uniform)[0], device.sample(uniform)[0]
    assert torch.equal(batch.next_inputs.obs, other.next_inputs.obs)  # type: ignore[arg-type]


# Lost files of 4 rows each, of rows 4 to 20 -> the actions left. Of the row before a gap only the
# observation is left, as the successor of the row before it.
LOST: dict[str, tuple[list[int], list[int]]] = {
    "none": ([], [*range(4, 20)]),
    "oldest": ([0], [*range(8, 20)]),
    "middle": ([1], [4, 5, 6, *range(12, 20)]),
    "newest": ([3], [*range(4, 15)]),
    "two": ([1, 3], [4, 5, 6, 12, 13, 14]),
    "all": ([0, 1, 2, 3], []),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize(("n_envs", "n_step", "exponent"), [(1, 1, 0.0), (1, 1, 0.6), (2, 3, 0.6)])
def test_rows_around_a_lost_file_keep_their_successors(
    name: str,
    n_envs: int,
    n_step: int,
    exponent: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, (numbers, left) = LargeFiles(RunFolder(tmp_path), salvages=True), LOST[name]
    settings: dict[str, Any] = {"n_step": n_step, "priority_exponent": exponent}
    buffer = made(16 * n_envs, n_envs, **settings)
    restored = made(16 * n_envs, n_envs, **settings)
    fill(buffer, 20, ends={5: "terminated", 13: "truncated"})
    monkeypatch.setattr(replay_files, "_FILE_BYTES", 4 * buffer.row_bytes)
    write_replay(files, buffer)
    for number in numbers:
        (tmp_path / "replay" / buffer.segments[number]["name"]).write_bytes(b"")

    restored.load_state_dict(buffer.state_dict())
    restored.begin(obs(*(100.0 * i + 20 for i in range(n_envs))), None)
    read_replay(files, restored, lost=find_lost(files, restored))

    assert (restored.n_written, len(restored)) == (20, len(left) * n_envs)
    assert audit(restored).fault == ""
    if left and n_step == 1:
        expected = transitions(buffer)
        assert transitions(restored) == {action: expected[action] for action in left}
    write_replay(files, restored)  # a new checkpoint needs none of the lost files
    again = made(16 * n_envs, n_envs, **settings)
    again.load_state_dict(restored.state_dict())
    again.begin(obs(*(100.0 * i + 20 for i in range(n_envs))), None)
    read_replay(files, again)
    assert len(again) == len(restored)
