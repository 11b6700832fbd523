"""ReplayAgent: the base of agents that learn from replay, such as DQN, SAC and your own.

It reads observations and masks, counts updates, saves and loads, and joins ranks. A subclass
makes its networks in ``__init__`` and has five members of its own: ``metric_names``, ``outputs``,
``explore``, ``gradient_step`` and ``greedy``. docs/own_algorithm.md shows one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.policy.acting_noise import ActingNoise
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.masks import ActionMasks, Mask, find_mask_leaf
from ml_pipeline.policy.observations import ObservationReader, Preprocess
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.policy.space_data import check_spaces, space_to_data
from ml_pipeline.ranks.batches import BatchPart
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import set_generator_state, stream_seed
from ml_pipeline.training.contracts import RunContext

ConfigT = TypeVar("ConfigT", bound=OffPolicyConfig, covariant=True)
RatesT = TypeVar("RatesT", bound="tuple[float, ...]")
# A NamedTuple of metrics, 0-d tensors or numbers. ``finite`` is False if a loss or a gradient was
# not finite; such a step changes nothing. Prioritised replay reads ``error``, the TD errors [B].
ResultT = TypeVar("ResultT", bound="tuple[Any, ...]", covariant=True)


class LearningRate(NamedTuple):
    """The annealed settings of an agent that anneals nothing else."""

    learning_rate: float


class UpdateNoise:
    """Standard normal noise of gradient steps, equal for any number of ranks.

    A rank uses its rows of the noise of the whole batch.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._device = device
        self.part: BatchPart | None = None  # None: the batch is whole

    def draw(self, n_rows: int, n_columns: int) -> Tensor:
        """[n_rows, n_columns], one row for each transition of the batch or of the part."""
        n_drawn = n_rows if self.part is None else self.part.size
        shape = (n_drawn, n_columns)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        return noise if self.part is None else noise[self.part.rows]


class ReplayAgent(ABC, Generic[ConfigT, RatesT, ResultT]):
    """A subclass sets ``distribution``, ``adams`` and ``parts`` in its ``__init__``."""

    memory_size = 0  # not recurrent
    turn_every = 1  # updates: every so many have the part that only some have, see ``begin_update``
    draws_in_updates: ClassVar[bool] = False  # whether ``gradient_step`` uses ``update_noise``
    metric_names: ClassVar[dict[str, str]]  # field of the result of an update -> name in the log

    distribution: Distribution
    adams: dict[str, FlatAdam]  # one per loss
    parts: dict[str, nn.Module]  # what is learnt: saved, and taken over by init_from
    kept: dict[str, Tensor]  # what else a resumed run needs, such as a metric of an earlier update

    def __init__(self, spaces: Spaces, config: ConfigT, context: RunContext) -> None:
        self.config = config
        self.device = context.device
        self.spaces = {"observation_space": spaces.observation, "action_space": spaces.action}
        self.reader = ObservationReader(spaces.observation)
        self.inputs = partial(self.reader.policy_input, device=self.device)
        mask_leaf = find_mask_leaf(config.action_mask, self.reader)
        clip = config.clip_obs if config.normalize_obs else None
        preprocess = Preprocess(self.reader, ignored=mask_leaf, clip=clip)
        self.preprocess = preprocess.to(self.device)
        self.n_updates = 0
        self.kept = {}
        self._remark = ""  # why readable code runs instead of fast code, until it is reported
        self._seed = context.seed
        self.update_generator: torch.Generator | None = None
        if self.draws_in_updates:
            seed = stream_seed(context.seed, "update noise")
            self.update_generator = torch.Generator(self.device).manual_seed(seed)

    @cached_property
    def update_noise(self) -> UpdateNoise:
        """The noise of gradient steps, which does not depend on the number of ranks."""
        if self.update_generator is None:
            raise TypeError(f"{type(self).__name__} needs draws_in_updates = True")
        return UpdateNoise(self.update_generator, self.device)

    @contextmanager
    def first_weights(self) -> Iterator[None]:
        """Networks that are made within it begin with the weights of the run's seed."""
        # Layers draw their first weights from torch's global generator.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(self._seed, "weights"))
            yield

    def new_adam(self, module: nn.Module) -> FlatAdam:
        """The optimiser of a module on its device; a value of ``adams``."""
        norm = self.config.max_grad_norm
        return FlatAdam(
            module,
            eps=self.config.adam_eps,
            max_grad_norm=math.inf if norm is None else norm,
        )

    def step(self, name: str, loss: Tensor, rates: RatesT) -> bool | Tensor:
        """A gradient step of ``adams[name]`` alone; returns whether all was finite."""
        adam = self.adams[name]
        adam.grad.zero_()
        # Only these parameters: the loss of an actor must not train its critics.
        torch.autograd.backward(loss, inputs=adam.parameters)
        finite: bool | Tensor = adam.quick_step(rates[0], loss.detach())[1]
        return finite

    def keep(self, name: str, metric: Tensor) -> None:
        """Let later updates report ``self.kept[name]``; so it must cover the batch of all ranks."""
        adam = next(iter(self.adams.values()))
        self.kept[name].copy_(adam.world.weighted(metric.detach(), adam.share))

    @abstractmethod
    def outputs(self, inputs: PolicyInput) -> Tensor:
        """The outputs for ``distribution``, [B, n_outputs]: logits, values or means."""

    @abstractmethod
    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: RatesT, *, is_random: bool
    ) -> PolicySample:
        """Actions for training; ``is_random``: before the first update."""

    @abstractmethod
    def gradient_step(self, batch: ReplayBatch, rates: RatesT, is_turn: bool) -> ResultT:
        """One update that only changes tensors, so that it can be captured as a graph.

        ``is_turn`` is what ``begin_update`` returned.
        """

    @abstractmethod
    def greedy(self) -> GreedyPolicy:
        """The deterministic policy that export writes."""

    def policy_of(self, trunk: nn.Module, head: nn.Module) -> GreedyPolicy:
        """The deterministic policy of a network and its head."""
        return GreedyPolicy(
            self.reader,
            self.masks,
            preprocess=self.preprocess,
            trunk=trunk,
            head=head,
            distribution=self.distribution,
        )

    def begin_update(self) -> bool:
        """Count an update; returns whether it is the turn of the part that only some have."""
        self.n_updates += 1
        return self.n_updates % self.turn_every == 0

    def rates(self, progress: float, learning_rate: float) -> RatesT:
        """The annealed settings at ``progress`` (0 to 1) through the run."""
        return LearningRate(learning_rate)  # type: ignore[return-value]  # a subclass has its own

    def update(self, batch: ReplayBatch, rates: RatesT) -> ResultT:
        """One gradient step."""
        return self.gradient_step(batch, rates, self.begin_update())

    @property
    def takes_arrays(self) -> bool:
        """Whether ``explore`` and ``gradient_step`` take NumPy arrays in the place of tensors."""
        return False

    @cached_property
    def masks(self) -> ActionMasks:
        return ActionMasks(self.config.action_mask, self.reader, self.distribution)

    @cached_property
    def _acting_noise(self) -> ActingNoise:
        seed = stream_seed(self._seed, "act")
        return ActingNoise(self.distribution, n_steps=self.config.iteration_length, seed=seed)

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for ``n_steps`` steps, [n_rows, n_envs, ...], on the agent's device."""
        return self.distribution.draw_noise(n_steps, n_envs, generator).to(self.device)

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act]; gSDE keeps its noise for several calls."""
        leaves = self.reader.read(obs)
        n_envs = len(next(iter(leaves.values())))
        if n_envs == 0:
            return self.distribution.no_actions()
        inputs = self.inputs(leaves, self.masks.in_call(leaves, action_mask))
        return self._act(inputs, n_envs, deterministic)

    def _act(self, inputs: PolicyInput, n_envs: int, deterministic: bool) -> NDArray[np.generic]:
        noise = None if deterministic else self._acting_noise.next(n_envs).to(self.device)
        return self.distribution.chosen(self.outputs(inputs), noise)

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, Any]) -> Mask | None:
        """The masks in a vector env's infos, or None if this policy does not read them there."""
        return self.masks.of_infos(infos)

    def for_playing(self) -> ReplayAgent[ConfigT, RatesT, ResultT]:
        return self

    def check_fast(self) -> str:
        """Use readable code from now on if what fast code repeats has changed; returns why."""
        self.leave_changed_fast()
        remark, self._remark = self._remark, ""
        return remark

    def leave_changed_fast(self) -> None:
        """Drop a fast backend, with ``self._remark``, if what it repeats has changed."""

    def learn_moments(self, obs: Obs) -> None:
        """Add observations [N, ...] to the running normalisation."""
        self.preprocess.learn_moments(obs, next(iter(self.adams.values())).world)

    def join(self, world: World) -> None:
        """Start from the state of rank 0, and average gradients with the others from now on."""
        self.load_state_dict(world.agreed(self.state_dict()))
        for adam in self.adams.values():
            adam.world = world

    def take_part(self, part: BatchPart) -> None:
        """The next batch consists of these rows of the whole batch."""
        for adam in self.adams.values():
            adam.share = part.share
        if self.draws_in_updates:
            self.update_noise.part = part

    def learnt(self) -> list[Tensor]:
        """All float32 tensors that must be equal on all ranks."""
        trained = [each for adam in self.adams.values() for each in (adam.values, *adam.moments)]
        held = [each for part in self.parts.values() for each in part.state_dict().values()]
        held += self.kept.values()
        return [*trained, *(each for each in held if each.dtype == torch.float32)]

    def state_dict(self) -> StateDict:
        state = {
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            **{name: part.state_dict() for name, part in self.parts.items()},
            "adams": {name: adam.state_dict() for name, adam in self.adams.items()},
            "n_updates": self.n_updates,
            **self._acting_noise.state_dict(),
        }
        if self.update_generator is not None:
            state["update_generator"] = self.update_generator.get_state()
        return {**state, "kept": self.kept} if self.kept else state

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name, adam in self.adams.items():
            adam.load_state_dict(state["adams"][name])
        self.n_updates = state["n_updates"]
        self._acting_noise.load_state_dict(state)
        for name, tensor in self.kept.items():
            tensor.copy_(state["kept"][name])
        if self.update_generator is not None:
            set_generator_state(self.update_generator, state["update_generator"])
