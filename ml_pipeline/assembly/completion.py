"""What may follow on the command line of ``train``: keys of the config and their options.

Torch is not imported, so that the shell answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hydra._internal.utils import get_args_parser

from ml_pipeline.assembly.entry import config_of, group_options


def words_of_train(words: Sequence[str], current: str) -> Iterator[str]:
    """The words that may replace ``current``, the last one; keys one level at a time."""
    if current.startswith("-"):
        for action in get_args_parser()._actions:
            yield from (each for each in action.option_strings if each.startswith("--"))
        return
    key, has_value, _ = current.partition("=")
    mark = re.match(r"[+~]*", key)[0]  # type: ignore[index]  # it always matches
    options = group_options()
    if has_value:
        for option in options.get(key.removeprefix(mark), ()) or _values(words, key):
            yield f"{key}={option}"
        return
    typed = key.removeprefix(mark)
    for path in (*options, *_leaves(config_of(words, None))):
        if path.startswith(typed):
            more, dot, _ = path[len(typed) :].partition(".")
            yield f"{mark}{typed}{more}{dot or '='}"


def _values(words: Sequence[str], key: str) -> Sequence[str]:
    """The values of a switch."""
    value: object = config_of(words, None)
    for part in key.lstrip("+~").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return ("true", "false") if isinstance(value, bool) else ()


def _leaves(config: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted path of every setting; a group without keys counts as one."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
