"""Export: a trained policy as one file, from the env's observation to the action it takes.

Preprocessing, normaliser, actor, mask, greedy choice and clipping are baked in; the critic stays
behind. The file is tried on real observations beside the live policy before it is written: one
that disagrees never gets a name.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.agents.distributions import FORBIDDEN
from ml_pipeline.agents.observations import batched
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.agents.space_data import space_to_data, without_infinities
from ml_pipeline.deploy.exported import (
    MASK,
    MEMORY,
    METADATA_FILE,
    METADATA_FORMAT,
    METADATA_KEY,
    NEXT_MEMORY,
    Arrays,
    ExportedPolicy,
)
from ml_pipeline.errors import UserError, first_line
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.run_folder import write_atomically

FORMATS = ("pt2", "onnx")
N_OBSERVATIONS = 1_000
TOLERANCE = 1e-4  # of a number above 1: of its size

_EXAMPLE_ROWS = 2  # torch takes a dimension of 1 for one that never changes


class ExportError(UserError):
    """A policy that cannot be exported, or whose export does not do what it does."""


class Agreement(NamedTuple):
    """How the exported policy compared to the live one."""

    n_observations: int
    max_difference: float  # of logits or means, and of the memory's next state
    n_other_actions: int  # where two actions are tied within the tolerance


class Played(NamedTuple):
    """What a policy saw while it played, one row per step."""

    leaves: Arrays  # as the agent's reader names them, [n, ...]
    action_mask: NDArray[np.bool_] | None  # [n, n_choices]; None: not masked by the infos
    memory: Tensor | None  # [n, state_size], before the step


class GreedyPolicy(nn.Module):
    """The agent's way from observation to action as one module; holds copies of its parts."""

    def __init__(self, agent: PPOAgent) -> None:
        super().__init__()
        model = agent.model
        # Copies: the agent's parameters are views of one long tensor, which would be saved whole.
        self.preprocess = deepcopy(model.preprocess)
        self.actor = deepcopy(model.actor)
        self.policy_head = deepcopy(model.policy_head)
        self.distribution = deepcopy(model.distribution)
        self.cpu().eval().requires_grad_(False)
        self._reader = agent.reader
        self._mask_leaf = agent.mask_leaf
        self._wants_mask = agent.is_masked and agent.mask_leaf is None
        self.state_size = model.state_sizes[0] if agent.state_size else 0
        self.leaf_names = _leaf_names(list(agent.reader.leaves), self._own_inputs())

    def _own_inputs(self) -> list[str]:
        asked = {MASK: self._wants_mask, MEMORY: bool(self.state_size)}
        return [name for name, wanted in asked.items() if wanted]

    def example_inputs(self) -> dict[str, Tensor]:
        """Inputs of the right shapes and dtypes, in their order."""
        leaves = {
            leaf: np.stack([np.asarray(space.sample())] * _EXAMPLE_ROWS)
            for leaf, space in self._reader.leaves.items()
        }
        inputs = {
            name: torch.from_numpy(leaves[leaf].astype(self._reader.dtypes[leaf]))
            for name, leaf in self.leaf_names.items()
        }
        if self._wants_mask:
            inputs[MASK] = torch.ones(_EXAMPLE_ROWS, self.distribution.mask_size, dtype=torch.bool)
        if self.state_size:
            inputs[MEMORY] = torch.zeros(_EXAMPLE_ROWS, self.state_size)
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """[batch, ...] each: ``action`` for the env, ``policy`` (logits or means), the memory."""
        leaves = {leaf: inputs[name] for name, leaf in self.leaf_names.items()}
        mask = inputs[MASK] if self._wants_mask else None
        if self._mask_leaf is not None:
            mask = leaves[self._mask_leaf] != 0
        obs = self.preprocess(leaves[""] if self._reader.is_single else leaves)
        outputs = {}
        if self.state_size:
            state = inputs[MEMORY]
            start = torch.zeros(1, state.shape[0], dtype=torch.bool)
            obs = obs.unsqueeze(0) if isinstance(obs, Tensor) else _with_time(obs)
            features, next_state = self.actor(obs, state, start)
            features, outputs[NEXT_MEMORY] = features[0], next_state
        else:
            features = self.actor(obs)
        policy = self.policy_head(features)
        if mask is not None:
            policy = policy.masked_fill(~mask, FORBIDDEN)
        action = self.distribution.to_env_tensor(self.distribution.mode(policy))
        return {"action": action, "policy": policy, **outputs}


def _with_time(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.unsqueeze(0) for name, leaf in obs.items()}


def _leaf_names(leaves: list[str], taken: list[str]) -> dict[str, str]:
    """Names of inputs for the leaves of an observation: "obs", or "arm_angle" for "arm/angle"."""
    names: dict[str, str] = {}
    for leaf in leaves:
        name = leaf.replace("/", "_") or "obs"
        while name in names or name in taken:
            name = f"obs_{name}"
        names[name] = leaf
    return names


def export_policy(
    agent: PPOAgent,
    env: gym.Env[Any, Any],
    path: Path,
    *,
    file_format: str,
    facts: Mapping[str, Any],
) -> tuple[ExportedPolicy, Agreement]:
    """Write ``path``, if what it would hold agrees with ``agent`` on observations of ``env``.

    ``facts`` go into the metadata beside the spaces and the names of inputs and outputs.
    """
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise ExportError(f"{path} cannot be written: {why}; choose another with --out")
    module = GreedyPolicy(agent)
    network = type(agent.model.actor).__name__
    try:
        with _quiet_torch():
            program = _traced(module)
            metadata = {**_description(agent, module), **facts}
            text = json.dumps(metadata, allow_nan=False)
            content = _as_pt2(program, text) if file_format == "pt2" else _as_onnx(program, text)
    except UserError:
        raise
    except Exception as error:  # a user's network, and torch, raise what they like
        raise ExportError(
            f"network {network} cannot be exported as {file_format}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    policy = ExportedPolicy.from_bytes(content, str(path))
    agreement = compare(agent, policy, play_steps(agent, env, N_OBSERVATIONS))
    try:
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise ExportError(f"could not write {path}: {error}") from error
    return policy, agreement


def _traced(module: GreedyPolicy) -> torch.export.ExportedProgram:
    inputs = module.example_inputs()
    batch = torch.export.Dim("batch", min=1)
    shapes = ({name: {0: batch} for name in inputs},)
    try:
        return torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of torch, or of a user's network
        try:
            # Reads the code instead of running it; so len(x), for one, can vary with the batch.
            return torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=True)
        except Exception:
            raise error from None


def _description(agent: PPOAgent, module: GreedyPolicy) -> dict[str, Any]:
    """The metadata that follows from the policy itself."""
    inputs = module.example_inputs()
    outputs = module(inputs)
    return {
        "format": METADATA_FORMAT,
        "observation_space": _space_data(agent, "observation_space"),
        "action_space": _space_data(agent, "action_space"),
        "inputs": {
            name: {**_tensor_data(tensor), "leaf": module.leaf_names.get(name)}
            for name, tensor in inputs.items()
        },
        "outputs": {name: _tensor_data(tensor) for name, tensor in outputs.items()},
        "mask_leaf": agent.mask_leaf,
    }


def _space_data(agent: PPOAgent, name: str) -> Any:
    return without_infinities(space_to_data(agent.spaces[name]))


def _tensor_data(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape[1:])}


def _as_pt2(program: torch.export.ExportedProgram, metadata: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA_FILE: metadata})
    return file.getvalue()


def _as_onnx(program: torch.export.ExportedProgram, metadata: str) -> bytes:
    onnx = import_extra("onnx", needed_by="--format onnx")
    import_extra("onnxscript", needed_by="--format onnx")
    import_extra("onnxruntime", needed_by="--format onnx")  # for the check
    described = json.loads(metadata)
    exported = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(described["inputs"]),
        output_names=list(described["outputs"]),
        verbose=False,
    )
    if exported is None:
        raise RuntimeError("torch.onnx.export gave nothing")
    model = exported.model_proto
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]  # it speaks of the batch by torch's name for it
    onnx.helper.set_model_props(model, {METADATA_KEY: metadata})
    return bytes(model.SerializeToString())


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Without the exporters' remarks on each other; what goes wrong is raised, or is checked."""
    before, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        # torch prints the graph of a network that it cannot export, and the steps of one it can.
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def play_steps(agent: PPOAgent, env: gym.Env[Any, Any], n_steps: int) -> Played:
    """Observations as the policy meets them; it samples its actions, to meet more of them."""
    leaves: list[Arrays] = []
    masks: list[NDArray[np.bool_]] = []
    memories: list[Tensor] = []
    obs, info = env.reset(seed=0)
    memory = agent.new_memory(1)
    for _ in range(n_steps):
        batch = batched(env.observation_space, [obs])
        mask = agent.mask_of({name: [value] for name, value in info.items()})
        leaves.append(agent.reader.read(batch))
        if mask is not None:
            masks.append(mask)
        if memory is not None:
            memories.append(memory.clone())
        action = agent.act_batch(batch, action_mask=mask, memory=memory)[0]
        obs, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            obs, info = env.reset()
            memory = agent.new_memory(1)
    return Played(
        {name: np.concatenate([each[name] for each in leaves]) for name in leaves[0]},
        np.concatenate(masks) if masks else None,
        torch.cat(memories) if memories else None,
    )


def compare(agent: PPOAgent, policy: ExportedPolicy, played: Played) -> Agreement:
    """Both policies on the same observations, one by one and in batches; unlike is refused."""
    n_observations = len(next(iter(played.leaves.values())))
    distribution, size = agent.distribution, policy.state_size
    largest, n_other_actions = 0.0, 0
    for rows in _batches(n_observations):
        leaves = {name: leaf[rows] for name, leaf in played.leaves.items()}
        mask = None if played.action_mask is None else played.action_mask[rows]
        memory = None if played.memory is None else played.memory[rows].clone()
        # A critic with a memory has its part behind the actor's; it was not exported.
        state = None if memory is None else memory[:, :size].numpy().copy()
        live = agent.outputs_of(leaves, action_mask=mask, memory=memory)
        got = policy.run(policy.named_inputs(leaves, action_mask=mask, state=state))

        pairs = [(live[:, : distribution.n_outputs].numpy(), got["policy"])]
        if memory is not None:
            pairs.append((memory[:, :size].numpy(), got[NEXT_MEMORY]))
        for ours, theirs in pairs:
            largest = max(largest, _difference(ours, theirs))
        action = policy.to_env_action(got["action"])
        # By the exported policy's own numbers, so that a tie of two actions may fall either way.
        meant = agent.to_env_action(distribution.mode(torch.from_numpy(got["policy"])))
        _check_equal(action, meant)
        if np.issubdtype(action.dtype, np.integer):
            other = action != agent.to_env_action(distribution.mode(live))
            n_other_actions += int(other.reshape(len(other), -1).any(axis=1).sum())
    return Agreement(n_observations, largest, n_other_actions)


def _batches(n_rows: int) -> Iterator[slice]:
    """Eight single rows, then 64 at a time."""
    first = min(8, n_rows)
    yield from (slice(row, row + 1) for row in range(first))
    yield from (slice(row, min(row + 64, n_rows)) for row in range(first, n_rows, 64))


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The largest; nan where there is one."""
    difference = np.abs(ours.astype(np.float64) - theirs.reshape(ours.shape))
    if not (difference <= TOLERANCE * np.maximum(np.abs(ours), 1.0)).all():
        raise ExportError(
            f"the exported policy and the live one disagree by {difference.max():.3g}, more than "
            f"{TOLERANCE:g}; no file was written. A network that draws or counts in its forward "
            "cannot be exported"
        )
    return float(difference.max())


def _check_equal(action: NDArray[Any], meant: NDArray[Any]) -> None:
    exact = np.issubdtype(meant.dtype, np.integer)
    same = action == meant if exact else np.isclose(action, meant, rtol=TOLERANCE, atol=TOLERANCE)
    if action.shape != meant.shape or not same.all():
        raise ExportError(
            f"the exported policy gives actions such as {action[0]} where its own output means "
            f"{meant[0]}; no file was written"
        )
