"""merge_infos: the infos of single envs as one dict in Gymnasium's format."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from ml_pipeline.envs.workers.shared_arrays import EnvArrays
from ml_pipeline.envs.workers.slice import StepInfo
from ml_pipeline.envs.workers.trees import read_row

Infos = dict[str, Any]
AddInfo = Callable[[Infos, Infos, int], Infos]  # VectorEnv._add_info


def merge_infos(
    step_infos: list[StepInfo], arrays: EnvArrays, add_info: AddInfo, *, may_have_ended: bool
) -> Infos:
    """``may_have_ended``: also add the final observations and infos of ended episodes."""
    step_infos.sort(key=itemgetter(0))
    infos: Infos = {}
    if may_have_ended and b"\x01" in arrays.terminated.tobytes() + arrays.truncated.tobytes():
        final = {index: (obs, info) for index, obs, info, _ in step_infos}
        infos = _final_infos(final, arrays, add_info)
    for index, _, _, info in step_infos:
        if info:
            infos = add_info(infos, info, index)
    return infos


def _final_infos(
    final: dict[int, tuple[Any, Infos]], arrays: EnvArrays, add_info: AddInfo
) -> Infos:
    """The same as ``add_info`` for final_obs and final_info, but faster."""
    mask = arrays.terminated | arrays.truncated
    final_obs = np.empty(len(mask), dtype=object)  # filled with None
    final_info: Infos = {}
    for index in mask.nonzero()[0].tolist():
        obs, info = final.get(index, (None, {}))
        final_obs[index] = read_row(arrays.final_obs, index) if obs is None else obs
        if info:
            final_info = add_info(final_info, info, index)
    return {
        "final_obs": final_obs,
        "_final_obs": mask,
        "final_info": final_info,
        "_final_info": mask.copy(),
    }
