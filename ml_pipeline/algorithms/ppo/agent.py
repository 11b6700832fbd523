"""PPOAgent: an actor, a critic, and the clipped update that improves both.

``loss.ppo_loss`` is the algorithm; ``TorchPPO`` differentiates it. For small MLPs ``fast/`` has
faster backends that compute the same. They run only while the code that they repeat is unchanged
(``mirrors``), so an edit of the code below always takes effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.contracts import FastPPO, PPOBackend
from ml_pipeline.algorithms.ppo.fast.choice import fastest, mirrored
from ml_pipeline.algorithms.ppo.fast.compiled_ppo import CompiledPPO, compiled_or_none
from ml_pipeline.algorithms.ppo.loss import (
    LossTerms,
    Minibatch,
    Rates,
    UpdateResult,
    current,
    policy_change,
    ppo_loss,
)
from ml_pipeline.mirrors import why_not
from ml_pipeline.policy.acting_noise import ActingNoise
from ml_pipeline.policy.actor_critic import ActorCritic, GreedyPolicy, Passed, one_step
from ml_pipeline.policy.contracts import NetworkBuilder, Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.masks import ActionMasks, Mask, find_mask_leaf
from ml_pipeline.policy.observations import ObservationReader, map_obs, subspace
from ml_pipeline.policy.optimiser import FlatAdam, Optimiser, TorchOptimiser
from ml_pipeline.policy.space_data import check_spaces, space_to_data
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.targets import TargetError, check_arguments, import_entry, instantiate
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.graphs import Programs


class TorchPPO:
    """PPO's arithmetic in plain torch: works for every network, and is the reference."""

    acts_faster_on_cpu = takes_arrays = False

    def __init__(
        self,
        model: ActorCritic,
        adam: Optimiser,
        config: PPOConfig,
        *,
        precision: str = "float32",
        noise_seed: int = 0,
    ) -> None:
        """``noise_seed``: of ``Current.key``."""
        self.model = model
        self.adam = adam
        self.config = config
        self.precision = precision
        self.extra_metrics: tuple[str, ...] = ()  # that the loss returned last
        self._device = adam.values.device
        self._key = torch.tensor(noise_seed << 24, device=self._device)
        self.loss = find_loss(config)

    @property
    def has_standard_loss(self) -> bool:
        """Whether the loss is ``ppo_loss`` itself, which fast backends repeat."""
        loss = self.loss
        return isinstance(loss, partial) and loss.func is ppo_loss and not loss.keywords

    def passed(self, inputs: PolicyInput) -> Passed:
        """Both networks, in the precision of the run."""
        with self._rounding():
            result: Passed = self.model(inputs)
        return result

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        """Outputs for the action distribution of one step, and the next recurrent state."""
        if inputs.memory is None:
            with self._rounding():
                return self.model.policy(inputs).float(), None
        passed = self.passed(one_step(inputs))
        return passed.outputs[0].float(), passed.memory

    def acting(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        """As ``outputs``, without what only the critic reads."""
        with self._rounding():
            outputs, memory = self.model.acting(inputs)
        return outputs.float(), memory

    @torch.no_grad()
    def sample(self, inputs: PolicyInput, noise: Tensor, out: Tensor | None) -> PolicySample:
        """Actions; a backend may write them straight into ``out``."""
        outputs, memory = self.outputs(inputs)
        if self.config.on_nonfinite == "skip":
            outputs = outputs.nan_to_num()  # the envs need a valid action
        return PolicySample(self.model.distribution.sample(outputs, noise), memory)

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of ``action``: [B] each, or [T, B] for a recurrent policy."""
        passed = self.passed(inputs)
        outputs = passed.outputs.float()
        log_prob, _ = self.model.distribution.log_prob_and_entropy(outputs, action)
        return log_prob, passed.value.float()

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        """Values, [B]; any finite number where the mask ``wanted`` is False."""
        is_recurrent = inputs.memory is not None
        value = self.passed(one_step(inputs) if is_recurrent else inputs).value
        return (value[0] if is_recurrent else value).float()

    def evaluated(
        self, batch: Minibatch, rates: Rates, key: Tensor
    ) -> tuple[LossTerms, tuple[Tensor, Tensor]]:
        """The loss of a minibatch, and how far the policy has moved since the rollout."""
        now = current(self.model, self.passed, batch, key)
        terms = self.loss(now, batch, rates, self.config)
        return terms, policy_change(now.log_prob, batch, rates.clip_range)

    def update(
        self,
        batch: Minibatch,
        rates: Rates,
        evaluated: Callable[..., tuple[LossTerms, tuple[Tensor, Tensor]]] | None = None,
    ) -> UpdateResult:
        """One gradient step on one minibatch; ``evaluated`` may be compiled."""
        self.model.train()
        key = self._key + self.adam.n_steps.long()
        terms, change = (evaluated or self.evaluated)(batch, rates, key)
        self.model.eval()
        self.adam.differentiate(terms.total)
        norm, finite = self.adam.step(rates.learning_rate, terms.total.detach())
        _, *logged = (each.detach() for each in terms[:-1])
        extra = {name: each.detach() for name, each in terms.extra.items()}
        self.extra_metrics = tuple(extra)
        return UpdateResult._make([*logged, *change, norm, finite, extra])

    def refresh(self) -> None:
        """Called after the weights or the normaliser were replaced; nothing is cached here."""

    def _rounding(self) -> AbstractContextManager[Any]:
        """Autocast to bf16 if configured; tf32 is a global setting of torch."""
        wanted = self.precision == "bf16" and self._device.type != "cpu"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=wanted)


def find_loss(config: PPOConfig) -> Callable[..., LossTerms]:
    """The function that ``agent.loss`` names, with its keys, or an object of the class it names."""
    loss, options = import_entry(config.loss, key="agent.loss")
    if inspect.isclass(loss):
        made: Callable[..., LossTerms] = instantiate(config.loss, key="agent.loss", offers={})
        if not callable(made):
            raise TargetError(f"agent.loss: a {loss.__name__} cannot be called; it needs __call__")
        return made
    if "log_prob" in getattr(getattr(loss, "__code__", None), "co_varnames", ())[:1]:
        raise TargetError(
            f"agent.loss._target_={config.loss['_target_']}: a loss now takes (now, batch, rates, "
            "config); read now.log_prob, now.entropy and now.value: docs/ideas.md"
        )
    check_arguments(loss, options, key="agent.loss", given=4)
    return partial(loss, **options)


def new_optimiser(model: ActorCritic, config: PPOConfig) -> Optimiser:
    """``FlatAdam`` for ``torch.optim.Adam`` without further keys, which it equals."""
    limit = config.max_grad_norm
    if config.optimizer == {"_target_": "torch.optim.Adam"}:
        return FlatAdam(model, eps=config.adam_eps, max_grad_norm=limit)
    return TorchOptimiser(
        model,
        config.optimizer,
        learning_rate=config.learning_rate,
        max_grad_norm=limit,
        key="agent.optimizer",
    )


def as_row(result: UpdateResult) -> Tensor:
    """The numbers of a gradient step: those of ``extra``, then ``COLUMNS``."""
    return torch.stack([*result.extra.values(), *result[:-2], result.finite.float()])


class PPOAgent:
    """Proximal policy optimisation (Schulman et al., 2017)."""

    def __init__(
        self,
        spaces: Spaces,
        build_network: NetworkBuilder,
        config: PPOConfig,
        context: RunContext,
    ) -> None:
        self.config = config
        self.device = device = context.device
        self.spaces = {"observation_space": spaces.observation, "action_space": spaces.action}
        self._made_from = spaces, build_network, config
        self._seed = seed = context.seed
        self._player: PPOAgent | None = None
        self.reader = ObservationReader(spaces.observation)
        self.inputs = partial(self.reader.policy_input, device=device)
        self.model = ActorCritic(
            self.reader,
            spaces.action,
            build_network,
            config,
            mask_leaf=find_mask_leaf(config.action_mask, self.reader),
            generator=torch.Generator().manual_seed(stream_seed(seed, "weights")),
        )
        self.model.to(device).eval()  # except in updates: a network may have Dropout layers
        self.distribution = self.model.distribution
        # Acting does not need what only the critic reads.
        self.acting_reader = self.reader
        if self.model.own_preprocess is not None:
            leaves = [
                *self.model.preprocess.leaves,
                find_mask_leaf(config.action_mask, self.reader),
            ]
            own = subspace(spaces.observation, [each for each in leaves if each is not None])
            self.acting_reader = ObservationReader(own)
        self.masks = ActionMasks(config.action_mask, self.reader, self.distribution)
        self.memory_size = sum(self.model.memory_sizes)  # 0: not recurrent
        self.adam = new_optimiser(self.model, config)
        self._noise = ActingNoise(
            self.distribution, n_steps=config.n_steps, seed=stream_seed(seed, "act")
        )
        self.plain = TorchPPO(
            self.model,
            self.adam,
            config,
            precision=context.precision,
            noise_seed=stream_seed(seed, f"loss of rank {context.world.rank}"),
        )
        self._compiled: CompiledPPO | None = None
        self.fast: FastPPO | None = None
        self._remark = ""  # why plain torch runs instead of a fast backend, until it is reported
        if config.fast == "auto" and self.plain.has_standard_loss:
            self.fast = fastest(self.plain, masked=self.masks.are_used)
            self._leave_fast(self._why_changed())

    @property
    def backend(self) -> PPOBackend:
        return self.fast or self._compiled or self.plain

    def compile(self, programs: Programs) -> None:
        """Fuse the arithmetic on rollouts of one size that stay on the device."""
        if self.fast is None:
            self._compiled = compiled_or_none(self.plain, programs)

    @property
    def takes_arrays(self) -> bool:
        return self.backend.takes_arrays

    @property
    def acting_space(self) -> gym.Space[Any]:
        """Without what only the critic reads."""
        return self.acting_reader.space

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the loss adds, once it has run."""
        return () if self.fast is not None else self.plain.extra_metrics

    @property
    def normalises_over_ranks(self) -> bool:
        """Whether advantages are normalised over all ranks before an epoch, not in the loss."""
        return self.config.normalize_advantage and not self.plain.config.normalize_advantage

    def check_fast(self) -> str:
        """Use plain torch from now on if what the fast backend repeats has changed; returns why."""
        if self.fast is not None:
            self._leave_fast(self._why_changed() or self.fast.why_not())
        remark, self._remark = self._remark, ""
        return remark

    def _why_changed(self) -> str | None:
        if self.fast is None:
            return None
        if not self.plain.has_standard_loss:
            return "the loss was replaced"
        repeated = mirrored(self.fast, self.distribution)
        return why_not(repeated, self, self.plain, self.adam, *self.model.modules())

    def _leave_fast(self, reason: str | None) -> None:
        if self.fast is not None and reason is not None:
            self._remark = f"plain torch runs instead of {type(self.fast).__name__}: {reason}"
            self.fast = None

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for a rollout, [T, n_envs, ...], on the agent's device."""
        return self.distribution.draw_noise(n_steps, n_envs, generator).to(self.device)

    def sample_batch(
        self, inputs: PolicyInput, noise: Tensor, out: Tensor | None = None
    ) -> PolicySample:
        """Act in all envs with noise [n_envs, ...]; actions are also written to ``out``."""
        sample = self.backend.sample(inputs, noise, out)
        if out is not None and sample.action is not out:
            out.copy_(sample.action)
        return sample

    @torch.no_grad()
    def score_batch(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of ``action``: [B] each, or [T, B] for a recurrent policy."""
        return self.backend.score(inputs, action)

    @torch.no_grad()
    def value_batch(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        """Values, [B]; any finite number where the mask ``wanted`` is False."""
        return self.backend.value(inputs, wanted)

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], ready for ``env.step``; updates ``memory`` in place.

        Sampled actions of gSDE keep their noise for several calls, as in a rollout.
        """
        if self.memory_size and memory is None:
            raise ValueError("this policy is recurrent; pass memory=agent.new_memory(n_envs)")
        leaves = self.acting_reader.read(obs)
        mask = self.masks.in_call(leaves, action_mask)
        n_envs = len(next(iter(leaves.values())))
        if n_envs == 0:
            return self.distribution.no_actions()
        if deterministic and self.takes_arrays and memory is None:
            arrays: tuple[Any, Any] = (leaves[""] if self.reader.is_single else leaves, mask)
            outputs, _ = self.backend.outputs(PolicyInput(*arrays, None, None))
            return self.distribution.chosen(outputs, None)
        start = torch.zeros(n_envs, dtype=torch.bool, device=self.device)
        starts = start if self.memory_size else None
        inputs = self.acting_reader.policy_input(leaves, mask, memory, starts, device=self.device)
        has_all = self.acting_reader is self.reader
        outputs, next_memory = (self.backend.outputs if has_all else self.plain.acting)(inputs)
        if memory is not None and next_memory is not None:
            memory.copy_(next_memory)
        noise = None if deterministic else self._noise.next(n_envs).to(self.device)
        return self.distribution.chosen(outputs, noise)

    def new_memory(self, n_envs: int) -> Tensor | None:
        """Recurrent state at the start of ``n_envs`` episodes, or None without one."""
        size = self.memory_size
        return torch.zeros(n_envs, size, device=self.device) if size else None

    def mask_of(self, infos: Mapping[str, Any]) -> Mask | None:
        """The masks in a vector env's infos, or None if this policy does not read them there."""
        return self.masks.of_infos(infos)

    def greedy(self) -> GreedyPolicy:
        return self.model.greedy(self.acting_reader, self.masks)

    def on_cpu(self) -> PPOAgent:
        """A new agent with the same settings on the CPU; its weights are not copied."""
        return PPOAgent(*self._made_from, RunContext.alone(seed=self._seed))

    def for_playing(self) -> PPOAgent:
        """This agent, or a CPU copy if launching GPU kernels takes longer than running them."""
        if not self.backend.acts_faster_on_cpu:
            return self
        self._player = self._player or self.on_cpu()
        self._player.model.load_state_dict(self.model.state_dict())
        return self._player

    def epoch(
        self,
        rollout: Minibatch,
        order: Sequence[Tensor] | Tensor,
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> Tensor:
        """One gradient step per minibatch; see ``as_row`` for the rows of the result.

        ``rollout`` is flat, [N, ...], and ``order`` shuffles its rows. For a recurrent policy it
        is [T, n_envs, ...], and ``order`` shuffles the envs. ``order`` is [n_minibatches, B].
        Several ranks have a share of each minibatch, so ``order`` may have parts of any size.
        """
        if self.fast is not None:
            return self.fast.epoch(rollout, order, rates, shares)  # mirrors this, see check_fast
        stops_early = self.device.type == "cpu" and self.config.on_nonfinite == "stop"
        take = Minibatch.take if self._compiled is None else self._compiled.take
        results: list[UpdateResult] = []
        for number, index in enumerate(order):
            self.adam.share = 1.0 if shares is None else shares[number]
            results.append(self.update(take(rollout, index), rates))
            if stops_early and not results[-1].finite:
                break
        return torch.stack([as_row(each) for each in results])

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
        """One gradient step on one minibatch."""
        return self.backend.update(batch, rates)

    def learn_moments(self, obs: Obs) -> None:
        """Add a rollout's observations, [T, n_envs, ...], to the running normalisation."""
        if self.config.normalize_obs:
            flat = map_obs(lambda leaf: leaf.flatten(0, 1), obs)
            self.model.learn_moments(flat, self.adam.world)
            self.backend.refresh()

    def learnt(self) -> StateDict:
        """What updates change; a part of ``state_dict``."""
        return {"model": self.model.state_dict(), "adam": self.adam.state_dict()}

    def load_learnt(self, state: StateDict) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.backend.refresh()

    def state_dict(self) -> StateDict:
        spaces = {name: space_to_data(space) for name, space in self.spaces.items()}
        return {"spaces": spaces, **self.learnt(), **self._noise.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        self.load_learnt(state)
        self._noise.load_state_dict(state)
