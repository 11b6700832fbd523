"""DQN and SAC on several ranks train as one process with all of their envs would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import rank_runs
import torch
from gymnasium import spaces
from rank_runs import REPLAY_CASES, of_two_ranks, trained
from torch import nn

from ml_pipeline.algorithms.replay.agent import UpdateNoise
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.files import read_replay, rows_of, write_replay
from ml_pipeline.algorithms.replay.learning import ReplayLearning
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.assembly.compose import ConfigError, checked_config, compose_config
from ml_pipeline.assembly.plan import check_ranks, make_plan
from ml_pipeline.errors import UserError
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.ranks.batches import BatchPart
from ml_pipeline.ranks.world import ALONE, RankError, World
from ml_pipeline.runs.checkpoint import LATEST, CheckpointError, load_checkpoint
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.resuming import save_latest
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training import loop as loops
from ml_pipeline.training.env_batch import EnvStep, FinalObservation, Seen
from ml_pipeline.training.graphs import Programs

CPU = torch.device("cpu")
Results = dict[str, list[dict[str, Any]]]


pytestmark = pytest.mark.xdist_group("rank_replay")  # tests share the runs of two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return of_two_ranks(tmp_path_factory.mktemp("ranks"), *REPLAY_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLAY_CASES)
def test_two_ranks_of_four_envs_learn_as_one_process_with_eight(
    case: str, two_ranks: Results, tmp_path: Path
) -> None:
    alone = trained(tmp_path, case, n_envs=8)

    leader, follower = two_ranks[case]
    for rank in (leader, follower):
        assert rank["env_steps"] == alone["env_steps"] == 3 * 5 * 8
        for name, weight in alone["model"].items():
            torch.testing.assert_close(rank["model"][name], weight, atol=1e-6, rtol=1e-6, msg=name)
    assert leader["rows"] == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in alone["rows"]]
    assert leader["rows"][-1]["replay/size"] == 96
    assert follower["rows"] == []  # callbacks run on rank 0


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLAY_CASES)
def test_ranks_have_equal_weights_after_every_gradient_step(case: str, two_ranks: Results) -> None:
    first, second = (rank["checksums"] for rank in two_ranks[case])

    # 18 updates; one of SAC is a step of the critics, of the actor and of the temperature.
    assert len(first) == {"sac, plain torch": 36}.get(case, 54 if case[:3] == "sac" else 18)
    assert len(set(first)) == len(first)
    assert first == second


def made(n_envs: int, world: World = ALONE, **options: Any) -> ReplayBuffer:
    reader = ObservationReader(spaces.Box(-1e6, 1e6, (1,), np.float32))
    settings: dict[str, Any] = {"n_step": 1, "gamma": 0.5, "device": CPU, **options}
    actions = Categorical(spaces.Discrete(100))
    return ReplayBuffer(24, n_envs, reader, actions, world=world, **settings)


def fill(buffer: ReplayBuffer, n_rows: int, *, first_env: int = 0) -> None:
    """Row t of env i observes 100 i + t; in row 2 the episode of env 1 is cut at 7000."""
    envs = [first_env + i for i in range(buffer.n_envs)]

    def obs(t: int) -> dict[str, Any]:
        return {"": np.array([[100.0 * i + t] for i in envs], np.float32)}

    buffer.begin(obs(0), None)
    for t in range(n_rows):
        cut = np.array([t == 2 and i == 1 for i in envs])
        final = {"": np.array([7000.0], np.float32)}
        finals = [FinalObservation(i, final, None) for i in np.flatnonzero(cut).tolist()]
        reward = np.array([100.0 * i + t for i in envs])
        none = np.zeros(len(envs), bool)
        step = EnvStep(obs(t + 1), None, reward, none, cut, finals=finals)
        buffer.write(np.array([t] * len(envs)), step)


def fill_on_device(buffer: ReplayBuffer, n_rows: int) -> None:
    """Row t observes and rewards t, as a tensor env writes it."""
    values = torch.arange(float(n_rows + 1)).repeat(buffer.n_envs, 1)
    buffer.begin({"": values[:, :1]}, None)
    for t in range(n_rows):
        none, after = torch.zeros(buffer.n_envs, dtype=torch.bool), values[:, t + 1 : t + 2]
        step = EnvStep({"": after}, None, values[:, t], none, none, Seen({"": after}, None, None))
        buffer.write(torch.full((buffer.n_envs,), t), step)
        buffer.count_row()


class Recorder:
    """An agent that keeps its batches."""

    metric_names: ClassVar[dict[str, str]] = {"loss": "loss/value"}
    takes_arrays = False

    def join(self, world: World) -> None:
        self.rewards: list[list[float]] = []
        self.parts: list[BatchPart] = []

    def learnt(self) -> list[torch.Tensor]:
        return [torch.ones(3)]

    def begin_update(self) -> bool:
        return False

    def take_part(self, part: BatchPart) -> None:
        self.parts.append(part)

    def gradient_step(self, batch: Any, rates: Any, is_turn: bool) -> Any:
        self.rewards.append(batch.reward.tolist())
        return rank_runs.Loss(0.5, True)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_parts_of_all_ranks_form_the_batches_of_one_process(batch_size: int) -> None:
    whole = made(4)
    fill(whole, 8)
    uniform = torch.rand(5, batch_size, generator=torch.Generator().manual_seed(3))
    expected = [sorted(whole.sample(each)[0].reward.tolist()) for each in uniform]

    found: list[list[float]] = [[] for _ in expected]
    n_empty = 0
    for rank in (0, 1):
        world = World(rank, 2)
        own = made(2, world)
        agent: Any = Recorder()
        fill(own, 8, first_env=2 * rank)
        assert len(own) == len(whole) == 24
        settings = {"batch_size": batch_size, "seed": 3}
        learning = ReplayLearning(agent, own, Programs(CPU), **settings, world=world)
        learning.begin(None, len(uniform))
        learning.run(len(uniform))
        for batch, part, reward in zip(found, agent.parts, agent.rewards, strict=True):
            assert part.size == batch_size
            assert len(part.rows) == len(reward) == max(part.share * batch_size, 1)
            batch += reward if part.share else []
            n_empty += not part.share

    assert [sorted(each) for each in found] == expected
    assert n_empty == (5 if batch_size == 1 else 0)


def test_priorities_of_all_envs_are_on_each_rank() -> None:
    whole, own = made(4, priority_exponent=1.0), made(2, World(0, 2), priority_exponent=1.0)
    fill(whole, 8)
    fill(own, 8)
    assert own.tree is not None
    assert whole.tree is not None
    on_device = made(2, World(0, 2), priority_exponent=1.0, on_device=True)
    fill_on_device(on_device, 8)
    assert on_device.tree is not None
    for each in (own, on_device):
        assert torch.equal(each.tree.priorities, whole.tree.priorities)
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(0))
    for buffer in (whole, own):
        buffer.prioritise(torch.tensor([12, 13, 27]), torch.tensor([3.0, 0.5, 9.0]))

    drawn, weight = own.draw(uniform, beta=0.4)
    expected, expected_weight = whole.draw(uniform, beta=0.4)

    assert drawn.tolist() == expected.tolist()
    assert weight.tolist() == expected_weight.tolist()
    assert len(set(drawn.tolist())) > 5


def test_noise_of_a_part_is_that_of_its_rows_in_the_whole_batch() -> None:
    whole, part = (UpdateNoise(torch.Generator().manual_seed(5), CPU) for _ in range(2))
    part.part = BatchPart(torch.tensor([1, 3]), size=4, share=0.5)

    assert torch.equal(part.draw(2, 3), whole.draw(4, 3)[[1, 3]])
    assert torch.equal(part.draw(2, 3), whole.draw(4, 3)[[1, 3]])  # the next noise agrees too


def test_another_number_of_ranks_reads_the_rows_of_its_own_envs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    whole = made(4)
    fill(whole, 8)
    segments = []
    for rank in (0, 1):
        part = made(2, World(rank, 2))
        fill(part, 8, first_env=2 * rank)
        write_replay(LargeFiles(run), part)
        segments.append(part.segments)

    expected = rows_of(whole, 2, 8)

    for n_ranks in (1, 4):
        n_own = 4 // n_ranks
        for rank in range(n_ranks):
            buffer = made(n_own, World(rank, n_ranks))
            buffer.n_written = 8
            read_replay(LargeFiles(run), buffer, segments, rank)
            found, own = rows_of(buffer, 2, 8), World(rank, n_ranks).envs(n_own)
            for name in ("obs ", "action", "reward", "done"):
                values = expected[name].view(6, 4, *expected[name].shape[1:])[:, own]
                assert torch.equal(found[name], values.flatten(0, 1)), name
            has_cut = own.start <= 1 < own.stop  # the final observation of env 1 in row 2
            assert found["final_at"].tolist() == ([1 - own.start] if has_cut else [])
            assert found["final obs "].tolist() == ([[7000.0]] if has_cut else [])


def saved_state(n_ranks: int, *, n_written: int = 8) -> dict[str, Any]:
    """A checkpoint of ``n_ranks`` with 4 envs in all; env i observes i."""
    parts = []
    for rank in range(n_ranks):
        envs = torch.arange(4.0)[World(rank, n_ranks).envs(4 // n_ranks)]
        position = {"leaves": {"": envs}, "mask": None, "episode_start": envs > 9, "stats": {}}
        replay = {"segments": [{"name": f"of rank {rank}"}], "n_saved": 8, "n_written": n_written}
        replay["n_envs"] = 4
        parts.append({"positions": [position], "replay": replay})
    first = {
        "replay": {**parts[0]["replay"], "priorities": "all"},
        "positions": parts[0]["positions"],
    }
    return first if n_ranks == 1 else {**first, "ranks": parts}


def loaded_by(world: World, saved: dict[str, Any]) -> dict[str, Any]:
    """What a rank loads of a checkpoint, if each has its share of the 4 envs."""
    own, parts = loops.state_of_rank(saved, world)
    return state_of_rank(own, parts, world, 4 // world.size)


def test_each_rank_resumes_with_its_own_files_and_the_priorities_of_all() -> None:
    own = loaded_by(World(1, 2), saved_state(2))

    assert own["replay"]["segments"] == [{"name": "of rank 1"}]
    assert own["replay"]["priorities"] == "all"
    assert own["positions"][0]["leaves"][""].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(("n_saved", "size"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_another_number_of_ranks_takes_the_observations_of_its_own_envs(
    n_saved: int, size: int
) -> None:
    seen = []
    for rank in range(size):
        own = loaded_by(World(rank, size), saved_state(n_saved))
        seen += own["positions"][0]["leaves"][""].tolist()
        assert own["replay"]["n_envs"] == 4
        assert [each[0]["name"] for each in own["rank_segments"]] == [
            f"of rank {rank}" for rank in range(n_saved)
        ]
        assert own["replay"]["segments"] == []  # the next checkpoint writes all rows

    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_best_checkpoint_is_refused_by_another_number_of_ranks() -> None:
    with pytest.raises(UserError, match="without its newest transitions; resume from latest"):
        loaded_by(World(0, 2), saved_state(1, n_written=9))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "12 envs on 3 ranks, but its replay has 8; use a number of ranks that divides 8"),
        (4, "16 envs on 4 ranks, but its replay has 8; use n_envs=2"),
    ],
)
def test_another_number_of_envs_is_refused_with_the_one_that_fits(size: int, message: str) -> None:
    fitting, old = {"replay": {"n_envs": 8}}, {"replay": {"n_written": 8}}

    assert state_of_rank(fitting, [{}, {}], World(0, 2), 4) == fitting
    assert state_of_rank(old, [{}] * size, World(0, size), 4) == old
    with pytest.raises(UserError, match=message):
        state_of_rank(fitting, [{}] * size, World(0, size), 4)


def test_sizes_and_layers_that_do_not_fit_several_ranks_are_refused() -> None:
    config = checked_config(compose_config(["agent=sac", "env=pendulum", "n_envs=4"]))
    plan = make_plan(checked_config(compose_config(["device=cpu", "logger=[]"])))
    place, agent = plan.context._replace(world=World(0, 2)), Recorder()
    agent.model = nn.Sequential(nn.BatchNorm1d(2))  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="network, which has BatchNorm layers: does not train on"):
        check_ranks(config, place, agent)  # type: ignore[arg-type]
    config.agent.buffer_size = 15  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"2 ranks: agent.buffer_size=15: .* need at least 16"):
        check_ranks(config, place, plan.agent)


class Silent:
    """A trainer with nothing to save."""

    agent, envs, progress, iteration_steps = None, (), 0.0, 8

    def state_dict(self) -> dict[str, Any]:
        return {}


class TwoInOne(World):
    """Two ranks in one process, which do the same."""

    def max(self, numbers: Any) -> list[int]:
        return list(numbers)

    def gathered(self, value: Any) -> list[Any]:
        return [value] * self.size


class OtherDiffers(TwoInOne):
    """The second rank has another checksum."""

    def sum_array(self, array: Any) -> None:
        array[1] = array[0] + 1


def test_ranks_that_have_learnt_different_weights_stop_with_their_number() -> None:
    world: World = OtherDiffers(0, 2)
    agent: Any = Recorder()
    learning = ReplayLearning(
        agent, made(2, world), Programs(CPU), batch_size=4, seed=3, world=world
    )

    with pytest.raises(RankError, match=r"rank 0: the weights differ from those of ranks \[1\]"):
        learning.means()


def test_rank_that_cannot_write_its_transitions_makes_the_save_fail(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.make()
    loop = loops.Loop(Silent(), world=TwoInOne(0, 2))  # type: ignore[arg-type]
    save_latest(run, loop)
    before = load_checkpoint(run, LATEST)

    def fail() -> None:
        raise CheckpointError("the disk of rank 1 is full")

    loop.save_files = fail
    loop.iteration = 5
    with pytest.raises(CheckpointError, match="the disk of rank 1 is full"):
        save_latest(run, loop)

    assert len(before["ranks"]) == 2
    assert load_checkpoint(run, LATEST)["iteration"] == 0
