"""ExportedPolicy: a policy from one file, with neither its run nor its network's code.

What loading trusts. An .onnx file is data: onnxruntime runs its graph and nothing else. A .pt2
file is read by ``torch.export.load``, here with pickles held to plain tensors; but torch says
itself that it trusts its file (it reads sizes as sympy expressions, which Python evaluates). So
load a .pt2 only from people whose programs you would run. Neither makes an env: whoever does, from
the metadata's ``env``, calls the classes that are named there.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.distributions import Categorical, Distribution, MultiCategorical
from ml_pipeline.agents.masks import MaskError, checked_mask, masks_in
from ml_pipeline.agents.observations import ObservationReader
from ml_pipeline.agents.policy import MASK, MEMORY, NEXT_MEMORY
from ml_pipeline.agents.space_data import space_from_data
from ml_pipeline.errors import UserError, first_line
from ml_pipeline.extras import import_extra

METADATA_FORMAT = 1  # raised when an older reader could not make sense of the metadata
METADATA_FILE = "metadata.json"  # within a .pt2
METADATA_KEY = "ml_pipeline"  # within an .onnx

Arrays = dict[str, NDArray[Any]]  # by name of input or output, [batch, ...] each


class PolicyFileError(UserError):
    """A file that is no exported policy, or one that cannot be read here."""


class TensorSpec(NamedTuple):
    """An input or an output, without its batch dimension."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    leaf: str | None  # of the observation; None: not part of it


class ExportedPolicy:
    """What ``play``, ``serve`` and ``evaluate`` need of a policy; it always acts greedily."""

    def __init__(self, run: Callable[[Arrays], Arrays], metadata: dict[str, Any]) -> None:
        """``run``: all inputs by name, in the metadata's order, to all outputs by name."""
        self.run = run
        self.metadata = metadata
        self.observation_space = space_from_data(metadata["observation_space"])
        self.action_space = space_from_data(metadata["action_space"])
        self.reader = ObservationReader(self.observation_space)
        self.inputs, self.outputs = (
            {
                name: TensorSpec(np.dtype(each["dtype"]), tuple(each["shape"]), each.get("leaf"))
                for name, each in metadata[kind].items()
            }
            for kind in ("inputs", "outputs")
        )
        memory, mask = (self.inputs.get(name) for name in (MEMORY, MASK))
        self.state_size = memory.shape[0] if memory is not None and memory.leaf is None else 0
        self.wants_mask = mask is not None and mask.leaf is None
        self.mask_leaf: str | None = metadata["mask_leaf"]
        self._choices: Distribution | None = None
        if isinstance(self.action_space, spaces.Discrete):
            self._choices = Categorical(self.action_space)
        elif isinstance(self.action_space, (spaces.MultiDiscrete, spaces.MultiBinary)):
            self._choices = MultiCategorical(self.action_space)

    @classmethod
    def load(cls, path: Path | str) -> ExportedPolicy:
        """The policy of a .pt2 or .onnx file; which it is, is seen by what it holds."""
        if Path(path).is_dir():
            raise PolicyFileError(
                f"{path} is a folder; export a run first: python -m ml_pipeline export {path}"
            )
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise PolicyFileError(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> ExportedPolicy:
        """``name`` stands in errors."""
        is_pt2 = zipfile.is_zipfile(io.BytesIO(content))
        try:
            run, text = (_load_pt2 if is_pt2 else _load_onnx)(content)
        except UserError:
            raise
        except Exception as error:  # both libraries raise what they like
            raise PolicyFileError(f"{name} is no exported policy: {first_line(error)}") from error
        if not text:
            raise PolicyFileError(
                f"{name} was not made by python -m ml_pipeline export: it has no metadata"
            )
        try:
            metadata = json.loads(text)
            known = metadata["format"] == METADATA_FORMAT
            if known:
                return cls(run, metadata)
        except (ValueError, KeyError, TypeError) as error:
            raise PolicyFileError(f"{name} has damaged metadata: {error!r}") from error
        raise PolicyFileError(
            f"{name} has metadata of format {metadata['format']}, this version reads "
            f"{METADATA_FORMAT}; export the run again"
        )

    @property
    def env_name(self) -> str:
        return str(self.metadata["env_name"])

    def act_batch(
        self,
        obs: Any,
        deterministic: bool = True,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], fit for ``env.step``; ``memory`` goes on in place."""
        if not deterministic:
            raise ValueError("an exported policy acts greedily; to sample, load the run itself")
        if self.state_size and memory is None:
            raise ValueError("this policy has a memory; pass memory=policy.new_memory(n_envs)")
        state = None if memory is None else memory.numpy()
        leaves = self.reader.read(obs)
        outputs = self.run(self.named_inputs(leaves, action_mask=action_mask, state=state))
        if memory is not None:
            memory.copy_(torch.from_numpy(outputs[NEXT_MEMORY]))
        return self.to_env_action(outputs["action"])

    def named_inputs(
        self,
        leaves: Arrays,
        *,
        action_mask: NDArray[np.bool_] | None,
        state: NDArray[Any] | None,
    ) -> Arrays:
        """All that ``run`` takes, in its order; the mask, wherever it is, leaves an action."""
        own = {MASK: action_mask, MEMORY: state}
        inputs = {
            name: own[name] if each.leaf is None else leaves[each.leaf]
            for name, each in self.inputs.items()
        }
        if self.wants_mask and action_mask is None:
            raise MaskError("this policy wants masks; pass action_mask=policy.mask_of(infos)")
        mask = action_mask if self.wants_mask else None
        if self.mask_leaf is not None:
            mask = leaves[self.mask_leaf] != 0
        if mask is not None and self._choices is not None:
            checked_mask(mask, self._choices)
        return {name: np.asarray(each) for name, each in inputs.items()}

    def to_env_action(self, action: NDArray[Any]) -> NDArray[Any]:
        """The output ``action`` in the dtype of the action space: a graph knows fewer of them."""
        return action.astype(self.action_space.dtype, copy=False)

    def new_memory(self, n_envs: int) -> Tensor | None:
        """The memory of a policy that has one, at the beginning of ``n_envs`` episodes."""
        return torch.zeros(n_envs, self.state_size) if self.state_size else None

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The masks in a vector env's infos, [n_envs, n]."""
        return masks_in(infos) if self.wants_mask else None


def _load_pt2(content: bytes) -> tuple[Callable[[Arrays], Arrays], str]:
    extra = {METADATA_FILE: ""}
    with _plain_pickles_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own formats
        program = torch.export.load(io.BytesIO(content), extra_files=extra)
        module = program.module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            # Contiguous: torch takes no array that runs backwards, as flipped images do.
            tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in inputs.items()}
            return {name: each.numpy() for name, each in module(tensors).items()}

    return run, extra[METADATA_FILE]


@contextmanager
def _plain_pickles_only() -> Iterator[None]:
    """Have ``torch.load`` refuse code, also where ``torch.export.load`` asks it not to."""
    forced = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in forced}
    os.environ.update(forced)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _load_onnx(content: bytes) -> tuple[Callable[[Arrays], Arrays], str]:
    onnxruntime = import_extra("onnxruntime", needed_by="an .onnx file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it says besides is raised, too
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "")
