"""network_fault: which line of a network turns finite observations into NaN or infinity."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ml_pipeline.errors import place_of_frames
from ml_pipeline.policy.actor_critic import GreedyPolicy

_N_TRIED = 20  # observations


def network_fault(policy: object, leaves: dict[str, Any] | None = None) -> str:
    """A line that names the network, if its features are not finite; otherwise an empty text.

    ``leaves``: observations as arrays, by leaf; None: random ones of the space.
    """
    if not isinstance(policy, GreedyPolicy):
        return ""
    for _ in range(_N_TRIED if leaves is None else 1):
        inputs = policy.example_inputs()
        if leaves is not None:
            for name, leaf in policy.leaf_names.items():
                inputs[name] = torch.from_numpy(np.ascontiguousarray(leaves[leaf]))
        if not all(bool(torch.isfinite(each).all()) for each in inputs.values()):
            return ""
        finder = _Finder()
        with torch.no_grad(), finder:
            features, _ = policy.features(inputs)
        if not torch.isfinite(features).all():
            value = "nan" if features.isnan().any() else "inf"
            place = finder.place_of_nan or finder.place_of_infinity
            return f"network {type(policy.trunk).__name__}: forward returned {value}{place}"
    return ""


class _Finder(TorchFunctionMode):
    """Notes where the first NaN and the first infinity come from."""

    def __init__(self) -> None:
        super().__init__()
        self.place_of_nan = ""
        self.place_of_infinity = ""
        self._depth = len(traceback.extract_stack()) - 1  # of our caller

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            if not self.place_of_nan and result.isnan().any():
                self.place_of_nan = self._place()
            if not self.place_of_infinity and result.isinf().any():
                self.place_of_infinity = self._place()
        return result

    def _place(self) -> str:
        return place_of_frames(traceback.extract_stack()[self._depth :])
