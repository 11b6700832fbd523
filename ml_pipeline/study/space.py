"""The search space of a study: a YAML file of config keys, checked before the first trial.

Each key has ``low`` and ``high`` (with ``log`` or ``step``), or ``choices``. A range of integers
gives integers.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from yaml import YAMLError

from ml_pipeline.assembly.compose import (
    ConfigError,
    checked_config,
    compose_config,
    own_folders,
)
from ml_pipeline.errors import first_line
from ml_pipeline.shelves import CONF, conf_folders
from ml_pipeline.study.folder import Rule, Space

_MOST_COMBINATIONS = 2_000  # of integers; 2 ms each


def read_space(name: str, config_dir: str | None = None) -> Space:
    """Read a space; ``name`` is the path of a YAML file, or a file of study/ in a config folder."""
    path = _find_space(name, config_dir)
    try:
        space = OmegaConf.to_container(OmegaConf.load(path))  # PyYAML would read 1e-5 as a string
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"space={name}: cannot read {path}: {first_line(error)}") from error
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"space={name}: {path} has no keys")
    rules = {str(key): rule for key, rule in space.items()}
    distributions(rules)
    return rules


def _find_space(name: str, config_dir: str | None) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        paths = [Path(name)]
    else:  # as Hydra searches
        places = [CONF, *conf_folders(), *own_folders(config_dir)]
        paths = [each / "study" / f"{name}.yaml" for each in places]
    for path in paths:
        if path.is_file():
            return path
    known = {each.stem for path in paths for each in path.parent.glob("*.yaml")}
    shown = ", ".join(sorted(known)) or "none"
    raise ConfigError(f"space={name}: {paths[0]} does not exist; existing: {shown}")


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space as Optuna's distributions; refuses a rule without any possible value."""
    return {key: _distribution(key, rule) for key, rule in space.items()}


def _distribution(key: str, rule: Rule) -> BaseDistribution:
    keys = set(rule) if isinstance(rule, dict) else set()  # the user's file may hold anything
    try:
        if keys == {"choices"}:
            return CategoricalDistribution(_labels(rule["choices"]))
        if {"low", "high"} <= keys <= {"low", "high", "log", "step"}:
            if all(isinstance(value, int) for value in rule.values()):
                return IntDistribution(**rule)
            ends = {end: float(rule[end]) for end in ("low", "high")}
            return FloatDistribution(**{**rule, **ends})
    except (TypeError, ValueError) as error:
        raise _space_error(f"{key}: {first_line(error)}") from error
    raise _space_error(f"{key}: needs low and high (log or step), or choices; got {rule}")


def _labels(choices: object) -> list[bool | int | float | str | None]:
    if not isinstance(choices, list) or any(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices must be a list of values or lists, got {choices}")
    labels = [_label(choice) if isinstance(choice, list) else choice for choice in choices]
    if len({repr(label) for label in labels}) < len(labels):  # unlike ==, tells 1 from true
        raise ValueError(f"choices has a value twice: {choices}")
    return labels


def _label(choice: list[object]) -> str:
    """A list as text: Optuna accepts only plain values."""
    return json.dumps(choice)


def _space_error(fact: str) -> ConfigError:
    return ConfigError(f"search space: {fact}")


def param_overrides(space: Space, params: Mapping[str, object]) -> list[str]:
    """Drawn values as overrides for Hydra."""
    overrides = []
    for key, drawn in params.items():
        if key not in space:
            raise _space_error(f"{key}: a trial in the journal has it, study.yaml does not")
        choices = space[key].get("choices", [])
        lists = {_label(choice): choice for choice in choices if isinstance(choice, list)}
        value = lists.get(drawn, drawn) if isinstance(drawn, str) else drawn
        if isinstance(value, str) and value not in choices:
            raise _space_error(f"{key}={value}: a trial in the journal has it, study.yaml does not")
        overrides.append(_override(key, value))
    return overrides


def _override(key: str, value: object) -> str:
    return f"{key}={json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"


def is_group(key: str) -> bool:
    """Whether the values of a key are files of conf/."""
    return any((each / key).is_dir() for each in (CONF, *conf_folders()))


def check_space(space: Space, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a key, a value or a combination of integers that no trial could train with.

    ``cfg`` is the config of ``overrides``, which all trials share.
    """
    cfg = copy.deepcopy(cfg)
    tried = {key: _tried_values(rule) for key, rule in space.items()}
    # Only Hydra can set a group, or add a key.
    composed = {key for key in space if key.startswith("+") or is_group(key)}
    first = {key: values[0] for key, values in tried.items() if key not in composed}
    for key, values in tried.items():
        for value in values:
            if key in composed:
                _check_composed(key, value, overrides)
            else:
                _check_point(cfg, {**first, key: value})
    for point in _combinations({key: tried[key] for key in first}):
        _check_point(cfg, {**first, **point})


def _tried_values(rule: Rule) -> list[Any]:
    """All choices, or the ends of a range and ``low + step``, an integer that may not divide."""
    if "choices" in rule:
        return list(rule["choices"])
    low, high = rule["low"], rule["high"]
    return list(dict.fromkeys([low, min(low + rule.get("step", 1), high), high]))


def _combinations(tried: Mapping[str, list[Any]]) -> list[dict[str, int]]:
    """Combinations of integers, because sizes may not fit together; a sample if too many."""
    sizes = {key: values for key, values in tried.items() if all(type(v) is int for v in values)}
    combinations = list(itertools.product(*sizes.values()))
    if len(combinations) > _MOST_COMBINATIONS:
        combinations = random.Random(0).sample(combinations, _MOST_COMBINATIONS)
    return [dict(zip(sizes, values, strict=True)) for values in combinations]


def _check_composed(key: str, value: object, overrides: Sequence[str]) -> None:
    try:
        checked_config(compose_config([*overrides, _override(key, value)]))
    except ConfigError as error:
        reason = str(error).removeprefix(f"{key}={value}: ")
        raise _space_error(f"{key}={value}: {reason}") from error


def _check_point(cfg: DictConfig, point: Mapping[str, object]) -> None:
    """Set all of ``point`` in ``cfg``, and check the result."""
    for key, value in point.items():
        try:
            OmegaConf.update(cfg, key, value)
        except OmegaConfBaseException as error:
            raise _space_error(f"{key}={value}: {first_line(error)}") from error
    try:
        checked_config(cfg)
    except ConfigError as error:
        raise _space_error(str(error)) from error
