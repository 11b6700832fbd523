"""Config values in tables: which keys differ between runs, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len

from ml_pipeline.errors import printable

# The seed, over which a group averages, and keys that have no effect on learning.
_NOT_COMPARED = (
    *("seed", "env_seeds", "device", "cpu_threads", "resume", "trust"),
    *("objective", "best_metric", "vec_env.", "logger."),
    *("name", "notes", "tags", "run_root", "rank_timeout_seconds"),
)
# Callbacks that only record, unless a class of the user has this name.
_RECORDERS = re.compile(r"callbacks\.(checkpoints|gpu|media|workers)\.")
_OURS = "ml_pipeline.callbacks."
_TARGET = "._target_"
ALGORITHM = "agent.algorithm"  # a dotted path, too
_MOST_CHARACTERS = 30  # of a value
_GAP = 2  # between columns

Columns = Mapping[str, Sequence[str]]  # title -> one cell per row


def is_compared(key: str, configs: Iterable[Mapping[str, object]]) -> bool:
    """Whether a key of these configs can affect learning; false for the seed, too."""
    recorder = _RECORDERS.match(key)
    if recorder:
        targets = {str(config.get(f"{recorder[0]}_target_", _OURS)) for config in configs}
        return not all(target.startswith(_OURS) for target in targets)
    return not key.startswith(_NOT_COMPARED)


def differing_keys(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Keys whose values differ between flat configs: the seed, then those that affect learning.

    Without the settings that only some algorithms have, if runs of one algorithm agree on them.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    algorithms: dict[object, list[Mapping[str, object]]] = {}
    for config in configs:
        algorithms.setdefault(config.get(ALGORITHM), []).append(config)
    differing = [
        key
        for key in keys
        if not _are_equal(key, configs) and not _follows_algorithm(key, list(algorithms.values()))
    ]
    return sorted(differing, key=lambda key: (key != "seed", not is_compared(key, configs)))


def _are_equal(key: str, configs: Sequence[Mapping[str, object]]) -> bool:
    """An option that is off equals one that did not exist yet."""
    found = [config[key] for config in configs if key in config]
    if len(found) < len(configs) and not all(map(is_off, found)):
        return False
    return all(each == found[0] for each in found)


def is_off(value: object) -> bool:
    return value is None or value is False


def _follows_algorithm(key: str, algorithms: Sequence[Sequence[Mapping[str, object]]]) -> bool:
    """Whether ``key`` differs only because some algorithms lack it."""
    is_setting = key.startswith("agent.") and key != ALGORITHM
    is_lacking = any(not any(key in config for config in same) for same in algorithms)
    return is_setting and is_lacking and all(_are_equal(key, same) for same in algorithms)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last part, or the whole key if another key has the same last part."""
    last = {key: key.removesuffix(_TARGET).rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {key: name if names.count(name) == 1 else key for key, name in last.items()}


def is_class(key: str) -> bool:
    """Whether the value of a key is the dotted path of a class."""
    return key.endswith(_TARGET) or key == ALGORITHM


def shown_value(config: Mapping[str, object], key: str) -> str:
    """A value as the command line writes it; a dash if the config lacks the key."""
    if key not in config:
        return "-"
    value = config[key]
    if is_class(key):
        return str(value).rpartition(".")[2]
    text = _text(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def fitted(needed: Columns, extra: Columns, width: int) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of a table, as many as fit into ``width``, and the titles of the others."""
    columns = {title: list(map(_one_line, cells)) for title, cells in needed.items()}
    taken = sum(map(_width, columns.items())) - _GAP
    hidden = []
    for title, texts in extra.items():
        cells = list(map(_one_line, texts))
        wide = _width((title, cells))
        if taken + wide <= width:
            columns[title] = cells
            taken += wide
        else:
            hidden.append(title)
    return columns, hidden


def table_lines(columns: Columns) -> list[str]:
    """The lines of a table; numbers are aligned at the right. Rich is slow at long tables."""
    padded = []
    for column in columns.items():
        title, cells = column
        is_number = all(re.fullmatch(r"[\d.,e+-]+", cell) for cell in cells)
        width = _width(column) - _GAP
        gaps = [" " * (width - cell_len(cell)) for cell in (title, *cells)]
        pairs = zip(gaps, (title, *cells), strict=True)
        padded.append([gap + cell if is_number else cell + gap for gap, cell in pairs])
    return [(" " * _GAP).join(row).rstrip() for row in zip(*padded, strict=True)]


def _width(column: tuple[str, Sequence[str]]) -> int:
    title, cells = column
    return _GAP + max(map(cell_len, (title, *cells)))


def _one_line(text: str) -> str:
    return re.sub(r"\s", " ", printable(text))
