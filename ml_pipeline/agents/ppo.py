"""PPOAgent: an actor, a critic, and the clipped update that improves both.

``update`` is one gradient step; how many there are, and on which minibatches, is the trainer's.
Small MLPs have faster ways to the same numbers: ``NumpyPPO`` on the CPU, ``TritonPPO`` on a GPU.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.agents.adam import FlatAdam
from ml_pipeline.agents.distributions import (
    FORBIDDEN,
    ActionSpaceError,
    Distribution,
    action_distribution,
)
from ml_pipeline.agents.fast.numpy_ppo import NumpyPPO
from ml_pipeline.agents.networks import init_orthogonal, out_features
from ml_pipeline.agents.observations import (
    ObservationReader,
    Preprocess,
    map_obs,
)
from ml_pipeline.agents.space_data import space_to_data
from ml_pipeline.config.train import PPOConfig
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Minibatch, Obs, PolicyInput, PolicySample, StateDict
from ml_pipeline.seeding import stream_seed

if TYPE_CHECKING:
    from ml_pipeline.agents.fast.triton_ppo import TritonPPO

NetworkBuilder = Callable[[gym.Space[Any]], nn.Module]

_MASK_KEY = "action_mask"  # in infos, and in Dict observations

# What ``update`` tells, in this order.
UPDATE_METRICS = (
    "loss/policy",
    "loss/value",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_fraction",
    "loss/grad_norm",
)


_YES, _NO = torch.tensor(True), torch.tensor(False)


class MaskError(UserError):
    """An action mask that is missing, of the wrong size, or leaves no action."""


class Rates(NamedTuple):
    """What is annealed, at its value of now.

    On a device they may be 0-d tensors, which a captured graph reads anew each time.
    """

    learning_rate: Any
    clip_range: Any
    entropy_coef: Any


class UpdateResult(NamedTuple):
    """What one gradient step tells; it stays on the device."""

    metrics: Tensor  # [len(UPDATE_METRICS)]
    finite: Tensor  # 0-d bool; False: loss or gradient was not, and nothing changed


class ActorCritic(nn.Module):
    """A network for the policy and one for the value, of the same build, or one for both."""

    def __init__(
        self,
        reader: ObservationReader,
        action_space: gym.Space[Any],
        build_network: NetworkBuilder,
        config: PPOConfig,
        *,
        mask_leaf: str | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        clip = config.clip_obs if config.normalize_obs else None
        self.preprocess = Preprocess(reader, ignored=mask_leaf, clip=clip)
        # Layers draw their first weights from torch's own generator: it is lent a seed.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            self.actor = build_network(self.preprocess.space)
            self.critic = None if config.shared_trunk else build_network(self.preprocess.space)
            n_features = out_features(self.actor)
            self.distribution = action_distribution(action_space, n_features, config)
            self.policy_head = nn.Linear(n_features, self.distribution.n_outputs)
            value_trunk = self.actor if self.critic is None else self.critic
            self.value_head = nn.Linear(out_features(value_trunk), 1)
        self.state_sizes = [
            int(getattr(trunk, "state_size", 0))
            for trunk in (self.actor, self.critic)
            if trunk is not None
        ]
        if config.orthogonal_init:
            for trunk in (self.actor, self.critic):
                if trunk is not None:
                    init_orthogonal(trunk, gain=math.sqrt(2.0), generator=generator)
            init_orthogonal(self.policy_head, gain=0.01, generator=generator)
            init_orthogonal(self.value_head, gain=1.0, generator=generator)

    def forward(self, inputs: PolicyInput) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs for the action distribution, values, and the memory's next state."""
        obs = self.preprocess(inputs.obs)
        states: list[Any] = [None, None]
        if inputs.state is not None:
            states = list(torch.split(inputs.state, self.state_sizes, dim=-1))
        features, state = _run(self.actor, obs, states[0], inputs.episode_start)
        value_features = features
        if self.critic is not None:
            value_features, other = _run(self.critic, obs, states[1], inputs.episode_start)
            if state is not None and other is not None:
                state = torch.cat([state, other], dim=-1)
        value: Tensor = self.value_head(value_features).squeeze(-1)
        return self._outputs(features, inputs.action_mask), value, state

    def policy(self, inputs: PolicyInput) -> Tensor:
        """Outputs alone, of a policy without memory, [B, n_outputs]."""
        features = self.actor(self.preprocess(inputs.obs))
        return self._outputs(features, inputs.action_mask)

    def _outputs(self, features: Tensor, action_mask: Tensor | None) -> Tensor:
        outputs: Tensor = self.policy_head(features)
        if action_mask is not None:
            outputs = outputs.masked_fill(~action_mask, FORBIDDEN)
        if self.distribution.reads_features:
            outputs = torch.cat([outputs, features], dim=-1)
        return outputs


def _run(
    trunk: nn.Module, obs: Obs, state: Tensor | None, episode_start: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if state is None:
        return trunk(obs), None
    features, state = trunk(obs, state, episode_start)
    return features, state


class PPOAgent:
    """Proximal policy optimisation."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        build_network: NetworkBuilder,
        config: PPOConfig,
        *,
        device: torch.device,
        seed: int,
        precision: str = "float32",
        by_hand: bool = True,
    ) -> None:
        """``precision``: of the products on a GPU, float32, tf32 or bf16.

        ``by_hand``: let ``NumpyPPO`` or ``TritonPPO`` do the arithmetic where they can; False is
        for tests.
        """
        self.config = config
        self.precision = precision
        self._build_network = build_network
        self._seed = seed
        self._player: PPOAgent | None = None
        self.device = device
        self.spaces = {"observation_space": observation_space, "action_space": action_space}
        self.reader = ObservationReader(observation_space)
        self.mask_leaf = self._find_mask_leaf()
        generator = torch.Generator().manual_seed(stream_seed(seed, "weights"))
        self.model = ActorCritic(
            self.reader,
            action_space,
            build_network,
            config,
            mask_leaf=self.mask_leaf,
            generator=generator,
        )
        self.model.to(device).eval()  # but for a gradient: a user's network may have a Dropout
        self.distribution = self.model.distribution
        self.is_masked = self.mask_leaf is not None or config.action_mask == "info"
        self._check_mask_size()
        self.state_size = sum(self.model.state_sizes)  # 0: no memory
        self.adam = FlatAdam(self.model, eps=config.adam_eps, max_grad_norm=config.max_grad_norm)
        self._act_generator = torch.Generator().manual_seed(stream_seed(seed, "act"))
        self._by_hand: NumpyPPO | None = None
        if by_hand and device.type == "cpu" and NumpyPPO.fits(self.model):
            self._by_hand = NumpyPPO(self.model, self.adam, config)
        self.remark = ""  # on what was tried, and did not work
        self.fused: TritonPPO | None = self._find_fused() if by_hand else None

    def _find_fused(self) -> TritonPPO | None:
        """The kernels for small MLPs, where they cover this one; Triton comes with torch's CUDA."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return None
        if importlib.util.find_spec("triton") is None:
            return None
        from ml_pipeline.agents.fast.triton_ppo import TritonPPO

        if not TritonPPO.fits(self.model):
            return None
        fused = TritonPPO(self.model, self.adam, self.config, precision=self.precision)
        reason = fused.why_not()
        if reason is None:
            return fused
        self.remark = f"plain torch does the work of the kernels for small MLPs: {reason}"
        return None

    def _rounding(self) -> AbstractContextManager[Any]:
        """Lets a GPU multiply in bf16 where that is asked for; tf32 is a setting of torch's."""
        wanted = self.precision == "bf16" and self.device.type != "cpu"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=wanted)

    # Inputs: from what the envs give to what the model takes.

    def inputs(
        self,
        leaves: dict[str, NDArray[Any]],
        action_mask: NDArray[np.bool_] | None = None,
        state: Tensor | None = None,
        episode_start: Tensor | None = None,
    ) -> PolicyInput:
        """One step of all envs; ``leaves`` is what the reader read."""
        obs = self.reader.to_tensors(leaves, self.device)
        mask = None if action_mask is None else torch.from_numpy(action_mask).to(self.device)
        return PolicyInput(obs, mask, state, episode_start)

    def mask_in(
        self, leaves: dict[str, NDArray[Any]], infos: Mapping[str, Any] | None
    ) -> NDArray[np.bool_] | None:
        """The mask of these observations, checked: every env has an action left."""
        if not self.is_masked:
            return None
        mask: NDArray[np.bool_]
        if self.mask_leaf is not None:
            mask = leaves[self.mask_leaf] != 0
        else:
            found = self.mask_of(infos or {})
            if found is None:
                raise MaskError(
                    "agent.action_mask=info, but the infos hold no action_mask; the env must give "
                    "one with every reset and step, and vec_env.infos must be all"
                )
            mask = found
        return checked_mask(mask, self.distribution)

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The masks in a vector env's infos, [n_envs, n]."""
        return masks_in(infos) if self.config.action_mask == "info" else None

    def _find_mask_leaf(self) -> str | None:
        wanted, leaves = self.config.action_mask, self.reader.leaves
        if wanted == "auto":
            return _MASK_KEY if _MASK_KEY in leaves else None
        if wanted in ("none", "info"):
            return None
        if wanted not in leaves or self.reader.is_single:
            known = ", ".join(leaves) if not self.reader.is_single else "none, it is no Dict"
            raise MaskError(
                f"agent.action_mask={wanted} is no key of the observation; its keys: {known}"
            )
        return wanted

    def _check_mask_size(self) -> None:
        if self.is_masked and not self.distribution.mask_size:
            raise ActionSpaceError(
                f"actions of {self.distribution.space} cannot be masked; agent.action_mask=none"
            )
        if self.mask_leaf is not None:
            shape = self.reader.shapes[self.mask_leaf]
            if shape != (self.distribution.mask_size,):
                raise MaskError(
                    f"the action mask {self.mask_leaf!r} of the observation has shape {shape}, "
                    f"the actions want ({self.distribution.mask_size},)"
                )

    # Acting.

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for a rollout, [T, n_envs, ...], on the agent's device."""
        return self.distribution.draw_noise(n_steps, n_envs, generator).to(self.device)

    @torch.no_grad()
    def sample_batch(
        self, inputs: PolicyInput, noise: Tensor, out: Tensor | None = None
    ) -> PolicySample:
        """Act in all envs with noise [n_envs, ...]; ``out`` is where the actions are to be."""
        sample = self._sample(inputs, noise, out)
        if out is not None and sample.action is not out:
            out.copy_(sample.action)
        return sample

    def _sample(self, inputs: PolicyInput, noise: Tensor, out: Tensor | None) -> PolicySample:
        if self.fused is not None and inputs.action_mask is None:
            if out is None:
                distribution = self.distribution
                shape = (len(noise), *distribution.action_shape)
                out = torch.empty(shape, dtype=distribution.action_dtype, device=self.device)
            self.fused.sample(inputs.obs, noise, out)  # type: ignore[arg-type]
            return PolicySample(out, None)
        if self._by_hand is not None:
            obs, mask, *_ = inputs
            arrays = obs.numpy(), None if mask is None else mask.numpy(), noise.numpy()  # type: ignore[union-attr]
            return PolicySample(torch.from_numpy(self._by_hand.sample(*arrays)), None)
        outputs, state = self._outputs_of_one_step(inputs)
        if self.config.on_nonfinite == "skip":
            outputs = outputs.nan_to_num()  # something is to be done, and nothing forbidden
        return PolicySample(self.distribution.sample(outputs, noise), state)

    def _outputs_of_one_step(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        if self._by_hand is not None:
            outputs = torch.from_numpy(self._by_hand.outputs(inputs.obs.numpy()))  # type: ignore[union-attr]
            mask = inputs.action_mask
            return outputs if mask is None else outputs.masked_fill(~mask, FORBIDDEN), None
        with self._rounding():
            if inputs.state is None:
                return self.model.policy(inputs).float(), None
            outputs, _, state = self.model(_with_time(inputs))
        return outputs[0].float(), state

    @torch.no_grad()
    def score_batch(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of what was done: [B] each, or [T, B] of a policy with a memory."""
        if self._by_hand is not None:
            obs, mask, *_ = inputs
            arrays = obs.numpy(), None if mask is None else mask.numpy(), action.numpy()  # type: ignore[union-attr]
            scores = self._by_hand.score(*arrays)
            return torch.from_numpy(scores[0]), torch.from_numpy(scores[1])
        if self.fused is not None and inputs.action_mask is None:
            return self.fused.score(inputs.obs, action)  # type: ignore[arg-type]
        with self._rounding():
            outputs, value, _ = self.model(inputs)
        log_prob, _ = self.distribution.log_prob_and_entropy(outputs.float(), action)
        return log_prob, value.float()

    @torch.no_grad()
    def value_batch(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        """[B]; of a policy with a memory, after its state and one more observation.

        ``wanted``, a mask, is for who needs but a few: the others may be any finite number.
        """
        if self._by_hand is not None:
            obs = inputs.obs.numpy()  # type: ignore[union-attr]
            if wanted is None:
                return torch.from_numpy(self._by_hand.value(obs))
            value = torch.zeros(len(obs))
            if wanted.any():
                value[wanted] = torch.from_numpy(self._by_hand.value(obs[wanted.numpy()]))
            return value
        if self.fused is not None:
            return self.fused.value(inputs.obs, wanted)  # type: ignore[arg-type]
        with self._rounding():
            if inputs.state is not None:
                _, values, _ = self.model(_with_time(inputs))
                return values[0].float()  # type: ignore[no-any-return]
            _, value, _ = self.model(inputs)
        return value.float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], fit for ``env.step``; ``memory`` goes on in place."""
        leaves = self.reader.read(obs)
        outputs = self.outputs_of(leaves, action_mask=action_mask, memory=memory)
        if deterministic:
            action = self.distribution.mode(outputs)
        else:
            noise = self.distribution.draw_noise(1, len(outputs), self._act_generator)[0]
            action = self.distribution.sample(outputs, noise.to(self.device))
        return self.to_env_action(action)

    @torch.no_grad()
    def outputs_of(
        self,
        leaves: dict[str, NDArray[Any]],
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """What the distribution of actions is made of, [n_envs, ...]; ``memory`` as above."""
        n_envs = len(next(iter(leaves.values())))
        if self.state_size and memory is None:
            raise ValueError("this policy has a memory; pass memory=agent.new_memory(n_envs)")
        if self.mask_leaf is not None:
            action_mask = self.mask_in(leaves, None)
        elif self.is_masked:
            if action_mask is None:
                raise MaskError("this policy wants masks; pass action_mask=agent.mask_of(infos)")
            action_mask = checked_mask(action_mask, self.distribution)
        start = (
            torch.zeros(n_envs, dtype=torch.bool, device=self.device) if self.state_size else None
        )
        inputs = self.inputs(leaves, action_mask, memory, start)
        outputs, state = self._outputs_of_one_step(inputs)
        if memory is not None and state is not None:
            memory.copy_(state)
        return outputs

    def for_playing(self) -> PPOAgent:
        """Itself, or where a GPU takes longer to start than the numbers take, a copy on the CPU.

        The copy has the weights of now, and its own draws.
        """
        if self.fused is None:
            return self
        if self._player is None:
            self._player = PPOAgent(
                self.spaces["observation_space"],
                self.spaces["action_space"],
                self._build_network,
                self.config,
                device=torch.device("cpu"),
                seed=self._seed,
            )
        self._player.model.load_state_dict(self.model.state_dict())
        return self._player

    def new_memory(self, n_envs: int) -> Tensor | None:
        """The memory of a policy that has one, at the beginning of ``n_envs`` episodes."""
        return torch.zeros(n_envs, self.state_size, device=self.device) if self.state_size else None

    def to_env_action(self, action: Tensor) -> NDArray[Any]:
        """Sampled actions as the envs take them; what is scored stays unclipped."""
        return self.distribution.to_env(action.cpu().numpy())

    # Learning.

    def epoch(self, rollout: Minibatch, order: Tensor, rates: Tensor) -> UpdateResult:
        """One gradient step per minibatch, without a wait for the device in between.

        ``rollout`` is flat, [N, ...], or of a policy with a memory [T, n_envs, ...]; ``order``
        are its rows, or its envs. ``rates`` are those of ``Rates``. What is told has a row for
        each minibatch.
        """
        n_minibatches = self.config.n_minibatches
        if self.fused is not None and rollout.inputs.action_mask is None:
            return UpdateResult(*self.fused.epoch(rollout, order, n_minibatches, rates))
        # NumPy wants numbers, and a graph wants tensors.
        now = Rates(*(rates.tolist() if self._by_hand is not None else rates.unbind()))
        results = [self.update(rollout.rows(rows), now) for rows in order.view(n_minibatches, -1)]
        return UpdateResult(*(torch.stack(each) for each in zip(*results, strict=True)))

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
        """One gradient step on one minibatch."""
        if self._by_hand is not None:
            *told, loss = self._by_hand.gradient(batch, rates.clip_range, rates.entropy_coef)
            norm, finite = self.adam.step_on_cpu(rates.learning_rate, loss)
            return UpdateResult(torch.tensor([*told, norm]), _YES if finite else _NO)
        metrics, total = self._gradient(batch, rates)
        norms, finites = self.adam.step(rates.learning_rate, total)
        return UpdateResult(torch.cat([metrics, norms.unsqueeze(0)]), finites)

    def _gradient(self, batch: Minibatch, rates: Rates) -> tuple[Tensor, Tensor]:
        """Leave the gradients of the loss; all metrics but the norm, and the loss."""
        config, clip_range = self.config, rates.clip_range
        self.model.train()
        with self._rounding():
            outputs, value, _ = self.model(batch.inputs)
        outputs, value = outputs.float(), value.float()
        self.model.eval()
        log_prob, entropy = self.distribution.log_prob_and_entropy(outputs, batch.action)
        log_ratio = log_prob - batch.log_prob
        ratio = log_ratio.exp()
        advantage = normalised(batch.advantage) if config.normalize_advantage else batch.advantage
        clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
        gain = torch.min(advantage * ratio, advantage * clipped)
        if config.dual_clip is not None:
            floor = torch.where(advantage < 0, advantage * config.dual_clip, -torch.inf)
            gain = torch.max(gain, floor)
        policy_loss = -gain.mean()
        squared = (value - batch.value_target).square()
        if config.clip_value_loss:
            moved = (value - batch.value).clamp(-clip_range, clip_range)
            squared = torch.max(squared, (batch.value + moved - batch.value_target).square())
        value_loss = 0.5 * squared.mean()
        mean_entropy = entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - rates.entropy_coef * mean_entropy

        self.adam.grad.zero_()
        torch.autograd.backward(loss)
        with torch.no_grad():
            metrics = [
                policy_loss,
                value_loss,
                mean_entropy,
                # Schulman's estimator: never negative, and less noisy than the mean log ratio.
                (ratio - 1.0 - log_ratio).mean(),
                ((ratio - 1.0).abs() > clip_range).float().mean(),
            ]
            return torch.stack([each.detach() for each in metrics]), loss.detach()

    def learn_moments(self, obs: Obs) -> None:
        """Take a rollout's observations, [T, n_envs, ...], into the running normalisation."""
        if self.config.normalize_obs:
            self.model.preprocess.learn_moments(map_obs(lambda leaf: leaf.flatten(0, 1), obs))
            if self.fused is not None:
                self.fused.learn_moments()

    def state_dict(self) -> StateDict:
        spaces = {name: space_to_data(space) for name, space in self.spaces.items()}
        return {
            "spaces": spaces,
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "act_generator": self._act_generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        for name, space in self.spaces.items():
            saved, own = state["spaces"][name], space_to_data(space)
            if saved != own:
                raise ValueError(f"{name} was {saved}, and is {own}")
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        if self.fused is not None:
            self.fused.learn_moments()
        self._act_generator.set_state(state["act_generator"])


def masks_in(infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    """The action masks in a vector env's infos, [n_envs, n]; None where there are none."""
    if _MASK_KEY not in infos:
        return None
    missing = np.flatnonzero(~np.asarray(infos.get(f"_{_MASK_KEY}", True)))
    if len(missing):
        raise MaskError(f"the infos of env {missing[0]} hold no action_mask in this step")
    given = infos[_MASK_KEY]
    if not isinstance(given, np.ndarray) or given.dtype == object:
        # One per choice of a MultiDiscrete space, as Gymnasium's own sample() takes them.
        given = np.stack([np.concatenate([np.ravel(part) for part in row]) for row in given])
    return np.asarray(given, dtype=bool)


def checked_mask(mask: NDArray[np.bool_], distribution: Distribution) -> NDArray[np.bool_]:
    """The mask, if it has the right size and leaves every env an action."""
    size = distribution.mask_size
    if mask.shape != (len(mask), size):
        raise MaskError(f"an action mask must hold {size} numbers, got shape {mask.shape[1:]}")
    stuck = np.flatnonzero(~distribution.leaves_a_choice(mask))
    if len(stuck):
        raise MaskError(f"the action mask of env {stuck[0]} allows no action: {mask[stuck[0]]}")
    return mask


def normalised(advantage: Tensor) -> Tensor:
    """Zero mean and unit variance over the minibatch."""
    centred = advantage - advantage.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


def _with_time(inputs: PolicyInput) -> PolicyInput:
    """One step as a sequence of one."""
    obs, mask, state, episode_start = inputs
    return PolicyInput(
        map_obs(lambda leaf: leaf.unsqueeze(0), obs),
        None if mask is None else mask.unsqueeze(0),
        state,
        None if episode_start is None else episode_start.unsqueeze(0),
    )
