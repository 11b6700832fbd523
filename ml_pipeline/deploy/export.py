"""Export: a trained policy as one file, from the env's observation to the greedy action.

The file contains preprocessing, normaliser, actor, mask, greedy choice and clipping, but not the
critic. Before it is written, it is compared to the live policy on real observations.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.deploy.exported import (
    CHECKSUM_KEY,
    METADATA_FILE,
    METADATA_FORMATS,
    METADATA_KEY,
    PURPOSE,
    ExportedPolicy,
    with_checksum,
)
from ml_pipeline.envs.factory import step_errors_named
from ml_pipeline.envs.kinds import AnyEnv, AnySpace
from ml_pipeline.envs.workers.trees import read_row
from ml_pipeline.errors import UserError, type_and_line
from ml_pipeline.extras import import_extra
from ml_pipeline.policy.actor_critic import ACTION, NEXT_MEMORY, GreedyPolicy
from ml_pipeline.policy.observations import batched
from ml_pipeline.policy.space_data import named_parts, space_to_data, without_infinities
from ml_pipeline.runs.run_folder import write_atomically
from ml_pipeline.runs.signatures import SIGNATURE_SIZE, signature
from ml_pipeline.training.contracts import Agent

N_OBSERVATIONS = 1_000
TOLERANCE = 1e-4  # absolute below 1, relative above
TIED_SHARE = 0.01  # of observations where rounding may decide between two discrete actions


class ExportError(UserError):
    """A policy cannot be exported, or the exported one behaves differently."""


class Agreement(NamedTuple):
    """How the exported policy compares to the live one."""

    n_observations: int
    max_difference: float  # of logits or means, and of the next recurrent state
    n_other_actions: int  # discrete actions that rounding decided differently


class Step(NamedTuple):
    """The inputs of a policy in one step of an episode."""

    obs: Any
    action_mask: NDArray[np.bool_] | None  # [1, n_choices]; None: the infos have no masks
    memory: Tensor | None  # [1, memory_size], before the step


def export_policy(
    agent: Agent,
    env: AnyEnv,
    path: Path,
    *,
    file_format: str,
    facts: Mapping[str, object],
) -> tuple[ExportedPolicy, Agreement]:
    """Write ``path`` if its content agrees with ``agent`` on observations of ``env``.

    ``facts`` are added to the metadata, next to the spaces and the names of inputs and outputs.
    """
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise ExportError(f"--out {path}: cannot be written, {why}; choose another file")
    module: GreedyPolicy = agent.greedy()
    network = type(module.trunk).__name__
    try:
        with _quiet_torch():
            program = _traced(module)
            metadata = {**_description(module), **facts}
            text = json.dumps(metadata, allow_nan=False)
            content = _as_pt2(program, text) if file_format == "pt2" else _as_onnx(program, text)
    except UserError:
        raise
    except Exception as error:  # torch and a user's network may raise anything
        raise ExportError(
            f"network {network} cannot be exported as {file_format}: {type_and_line(error)}"
        ) from error
    content = _signed(content, file_format)
    if file_format == "onnx":  # a .pt2 is a zip file, which has checksums
        content = with_checksum(content)
    policy = ExportedPolicy.from_bytes(content, str(path), trust=True)
    steps = play_steps(agent, env, N_OBSERVATIONS)
    agreement = compare(agent, module, policy, steps, env.observation_space)
    try:
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise ExportError(f"could not write {path}: {error}") from error
    return policy, agreement


def _traced(module: GreedyPolicy) -> torch.export.ExportedProgram:
    inputs = module.example_inputs()
    batch = torch.export.Dim("batch", min=1, max=2**31 - 1)  # torch 2.6 refuses 2**63 - 1
    shapes = ({name: {0: batch} for name in inputs},)
    try:
        return torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch and a user's network may raise anything
        try:
            # Strict mode analyses the bytecode, so that len(x), for example, stays symbolic.
            return torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=True)
        except Exception:
            raise error from None


def _description(module: GreedyPolicy) -> dict[str, object]:
    """The metadata that follows from the policy itself."""
    inputs = module.example_inputs()
    outputs = module(inputs)
    return {
        "format": METADATA_FORMATS[ACTION not in outputs],
        "observation_space": without_infinities(space_to_data(module.reader.space)),
        "action_space": without_infinities(space_to_data(module.distribution.space)),
        "inputs": {
            name: {**_tensor_data(tensor), "leaf": module.leaf_names.get(name)}
            for name, tensor in inputs.items()
        },
        "outputs": {name: _tensor_data(tensor) for name, tensor in outputs.items()},
        "mask_leaf": module.mask_leaf,
    }


def _tensor_data(tensor: Tensor) -> dict[str, object]:
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
        raise RuntimeError("torch.onnx.export returned nothing")
    model = exported.model_proto
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]  # it names the batch dimension differently
    described[CHECKSUM_KEY] = "sha256"
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(described, allow_nan=False)})
    return bytes(model.SerializeToString())


def _signed(content: bytes, file_format: str) -> bytes:
    """The file with this user's signature at its end, in a place that other readers ignore."""
    if file_format == "pt2":  # a zip file ends with a comment and, before it, the comment's length
        opened = content[:-2] + SIGNATURE_SIZE.to_bytes(2, "little")
    else:  # protobuf: an unknown field, its number (1000) and its length
        opened = content + b"\xc2\x3e" + SIGNATURE_SIZE.to_bytes(1, "little")
    line = signature(PURPOSE, opened)
    return opened + line if line else content


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence the exporters; failures raise, and the result is checked."""
    before, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        # torch prints graphs and progress.
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def play_steps(agent: Agent, env: AnyEnv, n_steps: int) -> list[Step]:
    """Steps of episodes with sampled actions; greedy actions would reach fewer states."""
    steps: list[Step] = []
    with step_errors_named():
        obs, info = env.reset(seed=0)
    memory = agent.new_memory(1)
    for _ in range(n_steps):
        mask = agent.mask_of({name: [value] for name, value in info.items()})
        steps.append(Step(obs, mask, None if memory is None else memory.clone()))
        batch = batched(env.observation_space, [obs])
        action = read_row(agent.act_batch(batch, action_mask=mask, memory=memory), 0)
        with step_errors_named():
            obs, _, terminated, truncated, info = env.step(action)
            is_over = terminated or truncated
            if is_over:
                obs, info = env.reset()
        if is_over:
            memory = agent.new_memory(1)
    return steps


def compare(
    agent: Agent,
    module: GreedyPolicy,
    policy: ExportedPolicy,
    steps: Sequence[Step],
    space: AnySpace,
) -> Agreement:
    """Run the live agent and the file on the same observations; raises if they disagree."""
    size = module.memory_size
    largest, n_other_actions = 0.0, 0
    for rows in _batches(len(steps)):
        obs = batched(space, [each.obs for each in steps[rows]])
        masks = [each.action_mask for each in steps[rows] if each.action_mask is not None]
        memories = [each.memory for each in steps[rows] if each.memory is not None]
        mask = np.concatenate(masks) if masks else None
        memory = torch.cat(memories) if memories else None
        # The critic's recurrent state follows the actor's, and is not exported.
        state = None if memory is None or not size else memory[:, :size].numpy().copy()
        inputs = policy.named_inputs(module.reader.read(obs), action_mask=mask, state=state)
        got = policy.run(inputs)
        with torch.no_grad():
            expected = module({name: torch.from_numpy(each) for name, each in inputs.items()})
        actions = named_parts(policy.action_space, ACTION)
        for name in got.keys() - actions.keys():
            largest = max(largest, _difference(expected[name].numpy(), got[name]))
        live = agent.act_batch(obs, True, action_mask=mask, memory=memory)
        if memory is not None and size:
            largest = max(largest, _difference(memory[:, :size].numpy(), got[NEXT_MEMORY]))
        ours = named_parts(policy.to_env_action(got), ACTION)
        pairs = zip(ours.values(), named_parts(live, ACTION).values(), strict=True)
        is_other = [_other_actions(action, part) for action, part in pairs]
        n_other_actions += int(np.logical_or.reduce(is_other).sum())
    if n_other_actions > TIED_SHARE * len(steps):
        raise ExportError(
            f"the exported policy takes another action than the live one in {n_other_actions} of "
            f"{len(steps)} observations; no file was written"
        )
    return Agreement(len(steps), largest, n_other_actions)


def _other_actions(action: NDArray[np.generic], live: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Which rows have different actions; rounding may decide between equal choices."""
    if np.issubdtype(live.dtype, np.integer):
        other = action != live
    else:
        other = ~np.isclose(action, live, rtol=TOLERANCE, atol=TOLERANCE)
        if other.any():
            raise ExportError(
                f"the exported policy takes the action {action[other.nonzero()[0][0]]} where the "
                f"live one takes {live[other.nonzero()[0][0]]}; no file was written"
            )
    return np.asarray(other.reshape(len(other), -1).any(axis=1))


def _batches(n_rows: int) -> Iterator[slice]:
    """Eight single rows, then 64 at a time."""
    first = min(8, n_rows)
    yield from (slice(row, row + 1) for row in range(first))
    yield from (slice(row, min(row + 64, n_rows)) for row in range(first, n_rows, 64))


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The largest difference; raises if one exceeds the tolerance."""
    difference = np.abs(ours.astype(np.float64) - theirs.reshape(ours.shape))
    if not (difference <= TOLERANCE * np.maximum(np.abs(ours), 1.0)).all():
        raise ExportError(
            f"the exported policy and the live one differ by {difference.max():.3g}, more than "
            f"{TOLERANCE:g}; no file was written. A network whose forward draws random numbers or "
            "keeps state cannot be exported"
        )
    return float(difference.max())
