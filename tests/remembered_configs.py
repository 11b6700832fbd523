"""Lets Hydra compose each choice of the clone's config files once per test process.

Most tests start a short run, and composing its config takes longer than training. Each override is
still applied to a copy by Hydra. With the config folder of a test, nothing is remembered.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

from ml_pipeline.assembly.compose import find_modules_in_cwd

REPOSITORY = Path(__file__).resolve().parents[1]


def remember_configs() -> None:
    """Replace three functions of Hydra in this process; a second call has no effect."""
    if hasattr(config_loader_impl.create_defaults_list, "__wrapped__"):
        return
    config_loader_impl.create_defaults_list = _remembering_defaults(
        defaults_list.create_defaults_list
    )
    ConfigLoaderImpl._compose_config_from_defaults_list = _remembering_files(
        ConfigLoaderImpl._compose_config_from_defaults_list
    )
    OverridesParser.parse_rule = _remembering_words(OverridesParser.parse_rule)


def _folders(repo: Any) -> tuple[str, ...] | None:
    """Where Hydra looks for files, or None if a test may change them."""
    sources = repo.get_sources()
    files = [source.path for source in sources if source.scheme() == "file"]
    if all(Path(path).is_relative_to(REPOSITORY) for path in files):
        return tuple(source.full_path() for source in sources)
    return None


def _remembering_defaults(create: Callable[..., Any]) -> Callable[..., Any]:
    """Find the files of the same groups once."""
    known: dict[Hashable, Any] = {}

    @wraps(create)
    def remembered(repo: Any, config_name: Any, overrides_list: Any, **options: Any) -> Any:
        folders = _folders(repo)
        if folders is None:
            return create(repo, config_name, overrides_list, **options)
        mine = defaults_list.Overrides(repo, overrides_list)  # raises what ``create`` would
        values = {id(each) for each in mine.config_overrides}
        groups = [each.input_line for each in overrides_list if id(each) not in values]
        key = (folders, config_name, *groups, *options.items())
        if key not in known:
            known[key] = create(repo, config_name, overrides_list, **options)
        find_modules_in_cwd()  # as the file of an agent does
        found = copy.copy(known[key])
        found.config_overrides = mine.config_overrides
        return found

    return remembered


def _remembering_files(compose: Callable[..., Any]) -> Callable[..., Any]:
    """Merge the same files once."""
    known: dict[Hashable, bytes] = {}

    @wraps(compose)
    def remembered(self: Any, defaults: Any, repo: Any) -> Any:
        folders = _folders(repo)
        if folders is None:
            return compose(self, defaults, repo)
        key = (folders, *map(repr, defaults))
        if key not in known:
            known[key] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(known[key])

    return remembered


def _remembering_words(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Parse the same override once."""

    @cache
    def parsed(word: str, rule: str) -> Any:
        return parse(OverridesParser.create(), word, rule)

    @wraps(parse)
    def remembered(self: OverridesParser, word: str, rule: str) -> Any:
        return copy.copy(parsed(word, rule))

    return remembered
