"""Recurrent policies in tensor envs: the recurrent state is data that never leaves the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from small_agents import CPU, Played, agent_in
from tiny_torch_envs import Bare, Drift, Forbidding, Recall
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.envs.foreign_device_env import ForeignDeviceEnv
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.policy import min_gru, unrolled
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.policy.transformer import TransformerXL
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.graphs import Programs

MLP = {"_target_": "ml_pipeline.policy.networks.MLP", "hidden_sizes": [8]}
NETWORKS: dict[str, Any] = {
    **{
        cell: partial(Recurrent, cell=cell, size=6, encoder=MLP)
        for cell in ("lstm", "gru", "mingru")
    },
    "trxl": partial(TransformerXL, size=4, n_heads=2, window=3, encoder=MLP),
}
networks = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
GAMMA = 0.5
STEPS = {"all_steps", "all_steps_backward"}


def make_foreign(n_envs: int) -> ForeignDeviceEnv:
    """Its steps are not captured, so acting is a program of its own."""
    return ForeignDeviceEnv(ForeignVectorEnv(Bare(n_envs), "env"), device="cpu")


def as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unroll LSTMs and GRUs as on a device."""
    monkeypatch.setattr(Recurrent, "_in_segments", Recurrent._step_by_step)


class Replay:
    """The same policy on the observations of a rollout, one step and one call at a time."""

    def __init__(self, played: Played) -> None:
        self._agent, self._buffer = played.agent, played.buffer
        self.memory = self._agent.new_memory(played.collector.n_envs)
        self._starts = torch.ones(played.collector.n_envs, dtype=torch.bool)

    def step(self, t: int) -> tuple[Tensor, Tensor]:
        """log_prob and value of row ``t``."""
        inputs = self._inputs(self._buffer.obs[""][t], self._starts)
        if self._buffer.action_mask is not None:
            inputs = inputs._replace(action_mask=self._buffer.action_mask[t])
        one = inputs.mapped(lambda field: field.unsqueeze(0), self.memory)
        log_prob, value = self._agent.score_batch(one, self._buffer.action[t].unsqueeze(0))
        with torch.no_grad():
            _, self.memory = self._agent.backend.outputs(inputs)
        self._starts = self._buffer.terminated[t] | self._buffer.truncated[t]
        return log_prob[0], value[0]

    def value_after(self, t: int) -> Tensor:
        """The value of the true successor of row ``t``; call after ``step``."""
        final = self._inputs(self._buffer.final_obs[""][t], torch.zeros_like(self._starts))
        following = self._inputs(self._buffer.obs[""][t + 1], self._starts)
        cut, ended = self._buffer.truncated[t], self._buffer.terminated[t]
        value = torch.where(cut, *map(self._agent.value_batch, (final, following)))
        return value.masked_fill(ended, 0.0)

    def _inputs(self, obs: Tensor, starts: Tensor) -> PolicyInput:
        return PolicyInput(obs, None, self.memory, starts)


@networks
@pytest.mark.parametrize(
    ("make_env", "mask"),
    [(Drift, "none"), (partial(Forbidding, max_episode_steps=5), "info"), (make_foreign, "none")],
    ids=["tensor env", "masks", "foreign"],
)
@pytest.mark.parametrize("fast", [True, False], ids=["numpy", "torch"])
def test_rollouts_equal_a_replay_of_the_same_policy_step_by_step(
    network: Any, make_env: Any, mask: str, fast: bool
) -> None:
    env = make_env(5)
    played = Played(env, 20, agent_in(env, network, fast=fast, action_mask=mask))
    replay, n_cut = Replay(played), 0

    for _ in range(2):  # the second one begins within episodes
        played.collect()
        torch.testing.assert_close(played.buffer.memory, replay.memory)
        played.finish(gamma=GAMMA, lam=0.0)  # a target is then reward + gamma * V(successor)
        finished, buffer = played.buffer.finished(), played.buffer
        for t in range(20):
            log_prob, value = replay.step(t)
            torch.testing.assert_close(buffer.final_memory[t], replay.memory)
            torch.testing.assert_close(finished.log_prob[t], log_prob)
            torch.testing.assert_close(finished.value[t], value, rtol=1e-4, atol=1e-5)
            target = buffer.reward[t] + GAMMA * replay.value_after(t)
            torch.testing.assert_close(finished.value_target[t], target, rtol=1e-4, atol=1e-5)
        n_cut += int((buffer.truncated & ~buffer.terminated).sum())

    assert n_cut > 0
    assert replay.memory is not None
    assert replay.memory.abs().max() > 0.01


_OURS = {
    "all_steps": unrolled.all_steps,
    "all_steps_backward": unrolled.all_steps_backward,
    "all_linear_steps": min_gru.all_linear_steps,
}


class HostReads(TorchDispatchMode):
    """Refuses what waits for a device, or copies to it, and so cannot be captured as a graph."""

    ours: ClassVar[set[str]] = set()  # our own operations that ran
    _NAMES = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        has_mask = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1])
        )
        assert name not in self._NAMES, f"{name} reads on the host"
        assert not has_mask, f"{name} counts a mask on the host"
        if func.namespace == "ml_pipeline":
            self.ours.add(name)
            with self:  # also what is inside
                return _OURS[name]._init_fn(*args)
        return func(*args, **(kwargs or {}))


class Watched(Programs):
    """Runs what a GPU would capture, and refuses host reads there."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.names: set[str] = set()

    def captured(
        self, function: Callable[[], Any], name: str, generators: Sequence[Any] = ()
    ) -> Callable[[], Any]:
        def watched() -> Any:
            self.names.add(name)
            with HostReads():
                return function()

        return watched


def trained(network: Any, programs: Programs, **options: Any) -> PPOAgent:
    """An agent after two iterations; one per epoch would be read on the host."""
    env = Drift(6)
    settings = {"n_steps": 9, "n_minibatches": 3, "n_epochs": 2, "on_nonfinite": "skip", **options}
    agent = agent_in(env, network, fast=False, **settings)
    context = RunContext.alone()._replace(programs=programs)
    trainer = PPOTrainer(
        agent, Collector([env], env_seed=1, noise_seed=2, programs=programs), context
    )
    for _ in range(2):
        trainer.train_episode_vectorized()
    return agent


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared trunk", "two networks"])
def test_the_whole_iteration_can_be_captured_since_nothing_is_read_on_the_host(
    network: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_data(monkeypatch)
    monkeypatch.setattr(HostReads, "ours", set())
    programs = Watched()

    agent = trained(
        NETWORKS[network], programs, shared_trunk=shared, normalize_obs=True, scale_reward=True
    )

    assert programs.names == {"a rollout", "the end of a rollout", "the update"}
    assert float(agent.adam.n_steps) == 2 * 2 * 3
    wanted = {"lstm": STEPS, "gru": STEPS, "mingru": {"all_linear_steps"}, "trxl": set()}
    assert HostReads.ours == wanted[network]


def test_starts_that_are_read_on_the_host_are_noticed() -> None:
    with pytest.raises(AssertionError, match="nonzero reads on the host"):
        trained(NETWORKS["lstm"], Watched())


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_training_with_starts_as_data_gives_the_weights_of_starts_on_the_host(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = trained(NETWORKS[cell], Programs(CPU)).adam.values.clone()

    as_data(monkeypatch)
    values = trained(NETWORKS[cell], Programs(CPU)).adam.values

    torch.testing.assert_close(values, on_host, rtol=1e-3, atol=1e-4)


def test_memory_and_starts_keep_their_addresses() -> None:
    env = Drift(2)
    played = Played(env, 3, agent_in(env, NETWORKS["gru"]))
    found = []
    for _ in range(2):
        played.collect()
        played.finish()
        buffer, position = played.buffer, played.collector._batches[0]
        held = (buffer.memory, buffer.last_memory, buffer.final_memory, buffer.episode_start)
        held += (position.memory, position._shown.episode_start)
        found.append([each.data_ptr() for each in held])

    assert found[0] == found[1]


def test_a_resumed_collector_continues_with_the_recurrent_state() -> None:
    def new(noise_seed: int) -> Played:
        env = Drift(4)
        return Played(env, 10, agent_in(env, NETWORKS["lstm"]), noise_seed=noise_seed)

    ours, other = new(2), new(9)
    other.collect()
    ours.collect()

    other.resume(ours.collector.state_dict())
    for each in (ours, other):
        each.collect()
        each.finish()

    for mine, theirs in zip(
        ours.buffer.finished().tensors(), other.buffer.finished().tensors(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_position_of_another_kind_of_network_is_refused() -> None:
    env = Drift(4)
    with_memory, without = Played(env, 3, agent_in(env, NETWORKS["gru"])), Played(Drift(4), 3)
    for each in (with_memory, without):
        each.collect()

    for each, other in ((with_memory, without), (without, with_memory)):
        with pytest.raises(ValueError, match="the network has changed"):
            each.resume(other.collector.state_dict())


@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])
def test_a_task_that_needs_memory_is_learned(cell: str) -> None:
    env = Recall(64)
    settings = {"n_steps": 16, "n_minibatches": 4, "n_epochs": 4, "learning_rate": 1e-2}
    agent = agent_in(env, NETWORKS[cell], **settings)
    context = RunContext.alone()
    trainer = PPOTrainer(agent, Collector([env], env_seed=1, noise_seed=2), context)

    for _ in range(30):
        metrics = trainer.train_episode_vectorized()

    assert metrics["rollout/episode_return"] > 0.95  # 0.5 without memory
