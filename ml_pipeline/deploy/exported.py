"""ExportedPolicy: a policy from one file; needs neither its run nor the code of its network.

Safety: an .onnx file is data, and onnxruntime only runs its graph. A .pt2 file is a program:
``torch.export.load`` evaluates its sizes as Python expressions. So ``load`` refuses a .pt2 file
unless this user exported it (``is_own``), or ``trust`` is set. Loading creates no env. Creating
one from the metadata's ``env`` calls the classes named there; ``door.load`` checks them.
"""

from __future__ import annotations

import hashlib
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
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.deploy.onnx_data import check_self_contained
from ml_pipeline.errors import UserError, first_line, printable, shorten, type_and_line
from ml_pipeline.extras import import_extra
from ml_pipeline.foreign import read_regular
from ml_pipeline.policy.actor_critic import ACTION, MASK, MEMORY, NEXT_MEMORY
from ml_pipeline.policy.masks import MaskError, checked_mask, masks_in
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.policy.product import action_distribution
from ml_pipeline.policy.space_data import named_parts, space_from_data, tree_of
from ml_pipeline.runs.signatures import UntrustedError, is_signed

# Increased when older readers cannot use the metadata; 2: an action of several parts.
METADATA_FORMATS = (1, 2)
METADATA_FILE = "metadata.json"  # inside a .pt2
METADATA_KEY = "ml_pipeline"  # inside an .onnx
CHECKSUM_KEY = "checksum"  # of the metadata, if the .onnx ends with its SHA-256
PURPOSE = "policy"  # of the signature


# Protobuf: an unknown field, its number (1001) and its length, 64 hex digits.
_CHECKSUM_MARK = b"\xca\x3e\x40"
_CHECKSUM_SIZE = len(_CHECKSUM_MARK) + 64
_CHANGED = "it is damaged, or was changed after the export: copy or export it again"

Arrays = dict[str, NDArray[np.generic]]  # by name of input or output, [batch, ...] each


class PolicyFileError(UserError):
    """A file that is not an exported policy, or that cannot be read."""


class TensorSpec(NamedTuple):
    """An input or an output, without its batch dimension."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    leaf: str | None  # of the observation; None: not part of the observation


class ExportedPolicy:
    """A ``Policy`` that always acts greedily."""

    def __init__(
        self, run: Callable[[Arrays], Arrays], metadata: dict[str, Any], *, is_own: bool = True
    ) -> None:
        """``run`` maps the inputs, by name and in the metadata's order, to the outputs by name.

        ``is_own``: this user exported it, so it may name any class.
        """
        self.run = run
        self.metadata = metadata
        self.is_own = is_own
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
        self._distribution = action_distribution(self.action_space)

    @classmethod
    def load(cls, path: Path | str, *, trust: bool = False) -> ExportedPolicy:
        """Read a .pt2 or .onnx file; the content decides the format, not the name.

        ``trust`` accepts a .pt2 file of another user, which can run any code.
        """
        if os.path.isdir(path):
            raise PolicyFileError(
                f"{path} is a folder; export the run first: python -m ml_pipeline export {path}"
            )
        try:
            content = read_regular(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError):
                reason = f"{reason}; give a run folder or an exported file"
            raise PolicyFileError(f"{shorten(str(path))} cannot be read: {reason}") from error
        return cls.from_bytes(content, str(path), trust=trust)

    @classmethod
    def from_bytes(cls, content: bytes, name: str, *, trust: bool = False) -> ExportedPolicy:
        """``name`` is used in errors."""
        is_pt2, has_checksum = zipfile.is_zipfile(io.BytesIO(content)), False
        try:
            if is_pt2:
                _check_zip(content)
            else:
                content, has_checksum = _without_checksum(content)
            is_own = is_signed(PURPOSE, content)
            if is_pt2 and not (is_own or trust):
                raise UntrustedError(
                    f"{name}: this user did not export it, or it has changed since, and a .pt2 "
                    "file can run any code; add --trust if you trust its author, or ask for .onnx"
                )
            run, text = (_load_pt2 if is_pt2 else _load_onnx)(content)
        except UserError:
            raise
        except Exception as error:  # both libraries raise many types
            raise PolicyFileError(
                f"{name} is not an exported policy: {first_line(error)}"
            ) from error
        if not text:
            raise PolicyFileError(
                f"{name} has no metadata; create it with: python -m ml_pipeline export RUN"
            )
        try:
            metadata = json.loads(text)
            known = metadata["format"] in METADATA_FORMATS
            if metadata.get(CHECKSUM_KEY) and not (is_pt2 or has_checksum):
                raise PolicyFileError(f"{name} does not end with its checksum; {_CHANGED}")
            if known:
                policy = cls(run, metadata, is_own=is_own)
                policy._check()
                return policy
        except PolicyFileError:
            raise
        except Exception as error:  # the metadata may be anything
            reason = type_and_line(error)
            raise PolicyFileError(f"{name} has damaged metadata: {reason}") from error
        raise PolicyFileError(
            f"{name} has metadata format {metadata['format']}, but this version reads formats "
            f"{METADATA_FORMATS[0]} to {METADATA_FORMATS[-1]}; export the run again"
        )

    def _check(self) -> None:
        """Compare the metadata with the spaces, and with one call of the graph."""
        for key, kind in (("env_name", str), ("env", dict)):
            if not isinstance(self.metadata[key], kind):
                raise TypeError(f"{key} must be a {kind.__name__}, got {self.metadata[key]!r}")
        for name, each in self.inputs.items():
            shape = each.shape if each.leaf is None else self.reader.shapes[each.leaf]
            is_own = each.leaf is not None or name in (MASK, MEMORY)
            if not is_own or each.shape != shape or each.dtype.kind not in "biuf":
                raise ValueError(f"input {name} does not fit the observation space")
        if self.mask_leaf is not None and self.mask_leaf not in self.reader.shapes:
            raise ValueError(f"mask_leaf={self.mask_leaf} is not part of the observation space")
        outputs = self.run(
            {name: np.zeros((1, *each.shape), each.dtype) for name, each in self.inputs.items()}
        )
        if outputs.keys() != self.outputs.keys():
            raise ValueError(f"the outputs are {', '.join(outputs)}")
        parts = named_parts(self.action_space, ACTION)
        if not parts.keys() <= outputs.keys():
            raise ValueError(f"the outputs are {', '.join(outputs)}; expected {', '.join(parts)}")
        for name, each in self.outputs.items():
            found = outputs[name]
            wanted = parts[name].shape or () if name in parts else each.shape
            if found.shape != (1, *wanted) or found.dtype != each.dtype:
                raise ValueError(f"output {name} is {found.dtype} {found.shape}")

    @property
    def env_name(self) -> str:
        return printable(str(self.metadata["env_name"]))

    def act_batch(
        self,
        obs: Any,
        deterministic: bool = True,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act] for ``env.step``; updates ``memory`` in place."""
        if not deterministic:
            raise ValueError(
                "deterministic=False: an exported policy acts greedily; to sample, load the run"
            )
        if self.state_size and memory is None:
            raise ValueError("this policy is recurrent; pass memory=policy.new_memory(n_envs)")
        state = None if memory is None else memory.numpy()
        leaves = self.reader.read(obs)
        if len(next(iter(leaves.values()))) == 0:
            return self._distribution.no_actions()
        outputs = self.run(self.named_inputs(leaves, action_mask=action_mask, state=state))
        if memory is not None:
            memory.copy_(torch.from_numpy(outputs[NEXT_MEMORY]))
        action: NDArray[np.generic] = self.to_env_action(outputs)
        return action

    def named_inputs(
        self,
        leaves: Arrays,
        *,
        action_mask: NDArray[np.bool_] | None,
        state: NDArray[np.generic] | None,
    ) -> Arrays:
        """The arguments of ``run``, in its order; refuses a mask that allows no action."""
        own = {MASK: action_mask, MEMORY: state}
        inputs = {
            name: own[name] if each.leaf is None else leaves[each.leaf]
            for name, each in self.inputs.items()
        }
        if self.wants_mask and action_mask is None:
            raise MaskError(
                "this policy needs action masks; pass action_mask=policy.mask_of(infos)"
            )
        mask = action_mask if self.wants_mask else None
        if self.mask_leaf is not None:
            mask = leaves[self.mask_leaf] != 0
        if mask is not None:
            checked_mask(mask, self._distribution)
        return {name: np.asarray(each) for name, each in inputs.items()}

    def to_env_action(self, outputs: Arrays) -> Any:
        """The action in the form and dtypes of the action space; graphs support fewer dtypes."""
        return tree_of(
            self.action_space,
            ACTION,
            lambda name, space: outputs[name].astype(space.dtype, copy=False),
        )

    def new_memory(self, n_envs: int) -> Tensor | None:
        """The initial recurrent state of ``n_envs`` episodes, or None if there is none."""
        return torch.zeros(n_envs, self.state_size) if self.state_size else None

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The masks in a vector env's infos, [n_envs, n], or None if the policy uses none."""
        return masks_in(infos, self.action_space) if self.wants_mask else None


def with_checksum(content: bytes) -> bytes:
    """An .onnx file and the SHA-256 of all its bytes, in a field that other readers ignore."""
    return content + _CHECKSUM_MARK + hashlib.sha256(content).hexdigest().encode()


def _without_checksum(content: bytes) -> tuple[bytes, bool]:
    """What ``with_checksum`` was given, and whether there was a checksum: old files have none."""
    body, field = content[:-_CHECKSUM_SIZE], content[-_CHECKSUM_SIZE:]
    if not field.startswith(_CHECKSUM_MARK):
        return content, False
    if field[len(_CHECKSUM_MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise ValueError(f"its checksum does not match its content; {_CHANGED}")
    return body, True


def _check_zip(content: bytes) -> None:
    """Find changed bytes: torch does not compare the checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} does not match; copy or export it again")


def _load_pt2(content: bytes) -> tuple[Callable[[Arrays], Arrays], str]:
    extra = {METADATA_FILE: ""}
    with _plain_pickles_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own formats
        program = torch.export.load(io.BytesIO(content), extra_files=extra)
        module = program.module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            # torch refuses arrays with negative strides, such as flipped images.
            tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in inputs.items()}
            return {name: each.numpy() for name, each in module(tensors).items()}

    return run, extra[METADATA_FILE]


@contextmanager
def _plain_pickles_only() -> Iterator[None]:
    """Make ``torch.load`` refuse code, even if ``torch.export.load`` allows it."""
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
    check_self_contained(content)
    options = onnxruntime.SessionOptions()
    # onnxruntime would also read its own format, which nothing here checks.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 4  # its errors are raised, too
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "")
