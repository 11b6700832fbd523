"""Config values in tables: which keys differ between runs, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

_TARGET = "._target_"
_MOST_CHARACTERS = 30  # of a value
_GAP = 2  # between columns

Columns = Mapping[str, Sequence[str]]  # title -> one cell per row


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config with dotted keys: "agent.gamma" -> 0.99."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ between flat configs, in the order of the configs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last part, or the whole key if another key has the same last part."""
    last = {key: key.removesuffix(_TARGET).rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {key: name if names.count(name) == 1 else key for key, name in last.items()}


def shown_value(config: Mapping[str, Any], key: str) -> str:
    """A value as the command line writes it; a dash if the config lacks the key."""
    if key not in config:
        return "-"
    value = config[key]
    if key.endswith(_TARGET):
        return str(value).rpartition(".")[2]
    text = _text(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def fitted(left: Columns, extra: Columns, right: Columns, width: int) -> tuple[Table, list[str]]:
    """A table with the extra columns that fit into ``width``, and the titles of the others."""
    taken = sum(map(_width, (*left.items(), *right.items())))
    fitting = {}
    for title, cells in extra.items():
        wide = _width((title, cells))
        if taken + wide - _GAP <= width:
            fitting[title] = cells
            taken += wide
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (*left, *fitting):
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", overflow="fold")
    for row in zip(*left.values(), *fitting.values(), *right.values(), strict=True):
        table.add_row(*map(escape, row))
    return table, [title for title in extra if title not in fitting]


def _width(column: tuple[str, Sequence[str]]) -> int:
    title, cells = column
    return _GAP + max(map(len, (title, *cells)))
