"""The replay of several ranks in a checkpoint: each rank has the transitions of its own envs.

Another number of ranks can continue with all transitions if the number of all envs is the same:
each rank then takes the columns of its envs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.errors import UserError
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict


def state_of_rank(
    state: StateDict, parts: Sequence[StateDict], world: World, n_envs: int
) -> StateDict:
    """The state for a rank with ``n_envs``; ``parts`` are those of the ranks that saved it.

    With another number of ranks, ``rank_segments`` lists the files of each that saved it.
    """
    _check_n_envs(state["replay"].get("n_envs"), world, n_envs)
    if not world.misfit(len(parts)):
        return state
    if state["replay"]["n_saved"] < state["replay"]["n_written"]:
        raise UserError(
            "the checkpoint was saved without its newest transitions; resume from latest"
        )
    if len(parts) == 1:
        parts = [state]
    positions = _joined([part["positions"] for part in parts])
    return {
        **state,
        "replay": {**state["replay"], "segments": [], "n_saved": 0},
        "positions": None if positions is None else [_own_columns(positions, world)],
        "rank_segments": [part["replay"]["segments"] for part in parts],
    }


def _check_n_envs(n_saved: int | None, world: World, n_own: int) -> None:
    """Refuse another number of envs than that of the replay; old checkpoints do not have it."""
    n_envs = world.all_envs(n_own)
    if n_saved is None or n_saved == n_envs:
        return
    n_fitting, rest = divmod(n_saved, world.all_envs(1))
    fix = f"a number of ranks that divides {n_saved}" if rest else f"n_envs={n_fitting}"
    raise UserError(
        f"n_envs={n_own}: this run has {n_envs} envs on {world.name}, but its replay has "
        f"{n_saved}; use {fix}"
    )


def _joined(positions: Sequence[Any]) -> StateDict | None:
    """The positions of the envs of all ranks; None if a rank has none, or those of tensor envs."""
    if not all(isinstance(each, list) for each in positions):
        return None
    first, parts = positions[0][0], [each[0] for each in positions]

    def join(values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values))

    return {
        **first,
        "leaves": {
            name: join([each["leaves"][name] for each in parts]) for name in first["leaves"]
        },
        "mask": None if first["mask"] is None else join([each["mask"] for each in parts]),
        "episode_start": join([each["episode_start"] for each in parts]),
    }


def _own_columns(position: StateDict, world: World) -> StateDict:
    """The part of this rank; new episodes start, so its statistics do not matter."""
    own = world.envs(len(position["episode_start"]) // world.all_envs(1))
    mask = position["mask"]
    return {
        **position,
        "leaves": {name: leaf[own] for name, leaf in position["leaves"].items()},
        "mask": None if mask is None else mask[own],
        "episode_start": position["episode_start"][own],
    }


def own_rows(parts: Sequence[Mapping[str, Tensor]], n_rows: int, own: slice) -> dict[str, Tensor]:
    """Rows of several ranks side by side, and of these the envs ``own``.

    ``parts`` and the result are what ``rows.rows_of`` returns.
    """
    widths = [len(part["reward"]) // n_rows for part in parts]
    tables: dict[str, list[Tensor]] = {}
    first = 0
    for part, width in zip(parts, widths, strict=True):
        at = part["final_at"]
        row, env = at // width, at % width + first
        is_own = (env >= own.start) & (env < own.stop)
        for name, values in part.items():
            if name == "final_at":
                values = (row * (own.stop - own.start) + env - own.start)[is_own]
            elif name.startswith("final "):
                values = values[is_own]
            else:
                values = values.view(n_rows, width, *values.shape[1:])
            tables.setdefault(name, []).append(values)
        first += width
    return {
        name: torch.cat(values)
        if name.startswith("final")
        else torch.cat(values, dim=1)[:, own].flatten(0, 1)
        for name, values in tables.items()
    }
