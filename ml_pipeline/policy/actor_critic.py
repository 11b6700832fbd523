"""ActorCritic: the networks of a policy and its value. GreedyPolicy: the exported part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import NetworkBuilder, Networks, Obs, PolicyInput
from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.masks import ActionMasks
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observations import ObservationReader, Preprocess, map_obs
from ml_pipeline.policy.product import action_distribution
from ml_pipeline.policy.space_data import named_parts
from ml_pipeline.ranks.world import World

# Names in exported policies, where the recurrent state is called "state".
ACTION, MASK, MEMORY, NEXT_MEMORY = "action", "action_mask", "state", "next_state"

_EXAMPLE_ROWS = 2  # torch.export treats a dimension of 1 as constant


class ActorCriticSettings(Protocol):
    """The settings that ``ActorCritic`` reads."""

    obs_groups: dict[str, list[str]] | None
    normalize_obs: bool
    clip_obs: float
    shared_trunk: bool
    orthogonal_init: bool
    box_policy: str
    log_std_init: float
    gsde_every_steps: int


class Passed(NamedTuple):
    """One pass of ``ActorCritic``; a leading T if it is recurrent."""

    outputs: Tensor  # [B, n_outputs], for the action distribution
    value: Tensor  # [B]
    memory: Tensor | None  # the next recurrent state
    features: Tensor  # [B, n], of the actor's network
    value_features: Tensor  # [B, n], of the critic's network


class ActorCritic(nn.Module):
    """A network for the policy and one for the value, or one for both.

    With ``obs_groups`` they read different leaves of the observation.
    """

    def __init__(
        self,
        reader: ObservationReader,
        action_space: gym.Space[Any],
        build_network: NetworkBuilder,
        config: ActorCriticSettings,
        *,
        mask_leaf: str | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        clip = config.clip_obs if config.normalize_obs else None
        groups = checked_groups(config, reader)
        self.preprocess = Preprocess(reader, ignored=mask_leaf, clip=clip, only=groups["actor"])
        self.own_preprocess: Preprocess | None = None  # of the critic, if it reads other leaves
        if groups["critic"] != groups["actor"]:
            self.own_preprocess = Preprocess(
                reader, ignored=mask_leaf, clip=clip, only=groups["critic"]
            )
        build_critic = (
            build_network.critic if isinstance(build_network, Networks) else build_network
        )
        # Layers draw their first weights from torch's global generator, so seed it here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            self.actor = build_network(self.preprocess.space)
            self.critic = None
            if not config.shared_trunk:
                self.critic = build_critic(self.critic_preprocess.space)
            n_features = out_features(self.actor)
            self.distribution = action_distribution(action_space, n_features, config)
            self.policy_head = nn.Linear(n_features, self.distribution.n_outputs)
            value_trunk = self.actor if self.critic is None else self.critic
            self.value_head = nn.Linear(out_features(value_trunk), 1)
        trunks = [trunk for trunk in (self.actor, self.critic) if trunk is not None]
        self.memory_sizes = [int(getattr(trunk, "state_size", 0)) for trunk in trunks]
        if config.orthogonal_init:
            for trunk in trunks:
                init_orthogonal(trunk, gain=math.sqrt(2.0), generator=generator)
            init_orthogonal(self.policy_head, gain=0.01, generator=generator)
            init_orthogonal(self.value_head, gain=1.0, generator=generator)

    def forward(self, inputs: PolicyInput) -> Passed:
        """Actor and critic on the same observations."""
        obs = self.preprocess(inputs.obs)
        memories: list[Tensor | None] = [None, None]
        if inputs.memory is not None:
            memories = list(torch.split(inputs.memory, self.memory_sizes, dim=-1))
        features, memory = _run(self.actor, obs, memories[0], inputs.episode_start)
        value_features = features
        if self.critic is not None:
            if self.own_preprocess is not None:
                obs = self.own_preprocess(inputs.obs)
            value_features, other = _run(self.critic, obs, memories[1], inputs.episode_start)
            if memory is not None and other is not None:
                memory = torch.cat([memory, other], dim=-1)
        value: Tensor = self.value_head(value_features).squeeze(-1)
        outputs = self._outputs(features, inputs.action_mask)
        return Passed(outputs, value, memory, features, value_features)

    def policy(self, inputs: PolicyInput) -> Tensor:
        """Outputs without the value, [B, n_outputs]; not for a recurrent policy."""
        features = self.actor(self.preprocess(inputs.obs))
        return self._outputs(features, inputs.action_mask)

    @property
    def critic_preprocess(self) -> Preprocess:
        """What prepares the critic's observations."""
        return self.preprocess if self.own_preprocess is None else self.own_preprocess

    @torch.no_grad()
    def learn_moments(self, obs: Obs, world: World) -> None:
        """Add observations, [N, ...], to the running normalisation."""
        self.preprocess.learn_moments(obs, world)
        if self.own_preprocess is not None:
            self.own_preprocess.learn_moments(obs, world)

    def acting(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        """Outputs for one step without the critic, whose own memory stays as it is."""
        if inputs.memory is None:
            return self.policy(inputs), None
        obs, mask, _, start = one_step(inputs)
        own, *rest = torch.split(inputs.memory, self.memory_sizes, dim=-1)
        features, memory = _run(self.actor, self.preprocess(obs), own, start)
        kept = own if memory is None else memory
        return self._outputs(features, mask)[0], torch.cat([kept, *rest], dim=-1)

    def greedy(self, reader: ObservationReader, masks: ActionMasks) -> GreedyPolicy:
        return GreedyPolicy(
            reader,
            masks,
            preprocess=self.preprocess,
            trunk=self.actor,
            head=self.policy_head,
            distribution=self.distribution,
        )

    def _outputs(self, features: Tensor, action_mask: Tensor | None) -> Tensor:
        return policy_outputs(features, self.policy_head, action_mask, self.distribution)


def checked_groups(
    config: ActorCriticSettings, reader: ObservationReader
) -> dict[str, Sequence[str] | None]:
    """The leaves that the actor and the critic read; None: all."""
    groups, key = config.obs_groups, "agent.obs_groups"
    if groups is None:
        return {"actor": None, "critic": None}
    if reader.is_single:
        raise UserError(f"{key}={groups}: the observation is no Dict, so it has no keys to choose")
    for name, keys in groups.items():
        if name not in ("actor", "critic"):
            raise UserError(f"{key}.{name} is unknown; the groups are actor and critic")
        unknown = [each for each in keys if each not in reader.leaves]
        if unknown or not keys:
            known = ", ".join(reader.leaves)
            raise UserError(
                f"{key}.{name}={keys}: choose among the keys of the observation: {known}"
            )
    if config.shared_trunk and groups.get("actor") != groups.get("critic"):
        raise UserError(f"{key}: agent.shared_trunk=true has one network for both; set it to false")
    return {"actor": groups.get("actor"), "critic": groups.get("critic")}


def policy_outputs(
    features: Tensor, head: nn.Module, action_mask: Tensor | None, distribution: Distribution
) -> Tensor:
    """Outputs for the distribution, from the features of a network."""
    outputs: Tensor = head(features)
    if action_mask is not None:
        outputs = distribution.masked(outputs, action_mask)
    if distribution.reads_features:
        outputs = torch.cat([outputs, features], dim=-1)
    return outputs


def init_orthogonal(module: nn.Module, *, gain: float, generator: torch.Generator) -> None:
    """Orthogonal weights and zero biases in every layer; recurrent cells always use gain 1."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.RNNBase):
            for name, parameter in layer.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter, 1.0, generator=generator)
                else:
                    nn.init.zeros_(parameter)


def _run(
    trunk: nn.Module, obs: Obs, memory: Tensor | None, episode_start: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if memory is None or episode_start is None:
        return trunk(obs), None
    if memory.shape[-1] == 0:  # only the other network is recurrent
        flat = trunk(map_obs(lambda leaf: leaf.flatten(0, 1), obs))
        return flat.unflatten(0, episode_start.shape), memory
    features, memory = trunk(obs, memory, episode_start)
    return features, memory


def one_step(inputs: PolicyInput) -> PolicyInput:
    """One step of all envs as a sequence of length 1, for a recurrent network."""
    obs, mask, memory, episode_start = inputs
    return PolicyInput(
        map_obs(lambda leaf: leaf.unsqueeze(0), obs),
        None if mask is None else mask.unsqueeze(0),
        memory,
        None if episode_start is None else episode_start.unsqueeze(0),
    )


class GreedyPolicy(nn.Module):
    """From the env's observation to the greedy action, as one module that can be exported.

    It copies its parts: an agent's parameters may be views of one large tensor, which export would
    save as a whole.
    """

    def __init__(
        self,
        reader: ObservationReader,
        masks: ActionMasks,
        *,
        preprocess: Preprocess,
        trunk: nn.Module,
        head: nn.Module,
        distribution: Distribution,
    ) -> None:
        super().__init__()
        self.preprocess = deepcopy(preprocess)
        self.trunk = deepcopy(trunk)
        self.head = deepcopy(head)
        self.distribution = deepcopy(distribution)
        self.cpu().eval().requires_grad_(False)
        self.reader = reader
        self.mask_leaf = masks.leaf
        self.memory_size = int(getattr(trunk, "state_size", 0))
        self._takes_mask = masks.in_infos
        taken = [MASK] * masks.in_infos + [MEMORY] * bool(self.memory_size)
        self.leaf_names = _leaf_names(list(reader.leaves), taken)

    def example_inputs(self) -> dict[str, Tensor]:
        """Inputs of the right shapes and dtypes, in their order."""
        leaves = {
            leaf: np.stack([np.asarray(space.sample())] * _EXAMPLE_ROWS)
            for leaf, space in self.reader.leaves.items()
        }
        inputs = {
            name: torch.from_numpy(leaves[leaf].astype(self.reader.dtypes[leaf]))
            for name, leaf in self.leaf_names.items()
        }
        if self._takes_mask:
            inputs[MASK] = torch.ones(_EXAMPLE_ROWS, self.distribution.mask_size, dtype=torch.bool)
        if self.memory_size:
            inputs[MEMORY] = torch.zeros(_EXAMPLE_ROWS, self.memory_size)
        return inputs

    def features(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The output of the network, [batch, out_features], and the next recurrent state."""
        leaves = {leaf: inputs[name] for name, leaf in self.leaf_names.items()}
        obs = self.preprocess(leaves[""] if self.reader.is_single else leaves)
        if not self.memory_size:
            return self.trunk(obs), {}
        memory = inputs[MEMORY]
        start = torch.zeros(1, memory.shape[0], dtype=torch.bool)
        obs = map_obs(lambda leaf: leaf.unsqueeze(0), obs)
        features, next_memory = self.trunk(obs, memory, start)
        return features[0], {NEXT_MEMORY: next_memory}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """[batch, ...] each: ``action`` for the env, ``policy`` (logits or means), next state.

        An action of several parts has one output per part, such as "action/arm/0".
        """
        leaves = {leaf: inputs[name] for name, leaf in self.leaf_names.items()}
        mask = inputs[MASK] if self._takes_mask else None
        if self.mask_leaf is not None:
            mask = leaves[self.mask_leaf] != 0
        features, outputs = self.features(inputs)
        policy = self.head(features)
        if mask is not None:
            policy = self.distribution.masked(policy, mask)
        action = self.distribution.to_env_tensor(self.distribution.mode(policy))
        return {**named_parts(action, ACTION), "policy": policy, **outputs}


def _leaf_names(leaves: list[str], taken: list[str]) -> dict[str, str]:
    """Input names for the leaves of an observation: "obs", or "arm_angle" for "arm/angle"."""
    names: dict[str, str] = {}
    for leaf in leaves:
        name = leaf.replace("/", "_") or "obs"
        while name in names or name in taken:
            name = f"obs_{name}"
        names[name] = leaf
    return names
