"""The search space of a study: a YAML file of config keys, checked before the first trial.

Each key has ``low`` and ``high`` (with ``log`` or ``step``), or ``choices``. A range of integers
gives integers.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
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
    CONF,
    ConfigError,
    checked_config,
    compose_config,
    own_folders,
)
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.errors import first_line
from ml_pipeline.shelves import conf_folders

Space = dict[str, dict[str, Any]]

_MOST_COMBINATIONS = 2_000  # of integers; 2 ms each


def default_space(config: TrainConfig) -> str:
    """The name of the algorithm, which is also the name of its file in conf/study/."""
    return type(config.agent).__name__.removesuffix("Config").lower()


def read_space(name: str, config_dir: str | None = None) -> Space:
    """Read a space; ``name`` is the path of a YAML file, or a file of study/ in a config folder."""
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    places = [CONF, *conf_folders(), *own_folders(config_dir)]  # as Hydra searches
    folders = [each / "study" for each in places]
    paths = [Path(name)] if is_path else [each / f"{name}.yaml" for each in folders]
    path = next((each for each in paths if each.is_file()), paths[0])
    if not path.is_file():
        beside = [path.parent] if is_path else folders
        known = sorted({each.stem for folder in beside for each in folder.glob("*.yaml")})
        shown = ", ".join(known) or "none"
        raise ConfigError(f"space={name}: {path} does not exist; existing: {shown}")
    try:
        space = OmegaConf.to_container(OmegaConf.load(path))  # PyYAML would read 1e-5 as a string
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"space={name}: cannot read {path}: {first_line(error)}") from error
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"space={name}: {path} has no keys")
    rules = {str(key): rule for key, rule in space.items()}
    distributions(rules)
    return rules


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space as Optuna's distributions; refuses a rule without any possible value."""
    return {key: _distribution(key, rule) for key, rule in space.items()}


def _distribution(key: str, rule: Any) -> BaseDistribution:
    keys = set(rule) if isinstance(rule, dict) else set()
    try:
        if keys == {"choices"}:
            return CategoricalDistribution(_labels(rule["choices"]))
        if {"low", "high"} <= keys <= {"low", "high", "log", "step"}:
            if all(isinstance(value, int) for value in rule.values()):
                return IntDistribution(**rule)
            ends = {name: float(rule[name]) for name in ("low", "high")}
            return FloatDistribution(**{**rule, **ends})
    except (TypeError, ValueError) as error:
        raise _space_error(f"{key}: {first_line(error)}") from error
    raise _space_error(f"{key}: needs low and high (log or step), or choices; got {rule}")


def _labels(choices: Any) -> list[Any]:
    if not isinstance(choices, list) or any(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices must be a list of values or lists, got {choices}")
    labels = [_label(choice) for choice in choices]
    if len(set(map(repr, labels))) < len(labels):
        raise ValueError(f"choices has a value twice: {choices}")
    return labels


def _label(choice: Any) -> Any:
    """The choice as a value for Optuna, which accepts only plain values: a list becomes text."""
    return json.dumps(choice) if isinstance(choice, list) else choice


def _space_error(fact: str) -> ConfigError:
    return ConfigError(f"search space: {fact}")


def param_overrides(space: Space, params: Mapping[str, Any]) -> list[str]:
    """Drawn values as overrides for Hydra."""
    return [f"{key}={_text(_drawn(space[key], value))}" for key, value in params.items()]


def _drawn(rule: Mapping[str, Any], value: Any) -> Any:
    choices = rule.get("choices", [value])
    return next(choice for choice in choices if repr(_label(choice)) == repr(value))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def is_group(key: str) -> bool:
    """Whether the values of a key are files of conf/."""
    return any((each / key).is_dir() for each in (CONF, *conf_folders()))


def check_space(space: Space, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a key, a value or a combination of integers that no trial could train with.

    ``cfg`` is the config of ``overrides``, which all trials share.
    """
    cfg = copy.deepcopy(cfg)
    tried = {key: _tried_values(rule) for key, rule in space.items()}
    first = {key: values[0] for key, values in tried.items() if not _is_composed(key)}
    for key, values in tried.items():
        for value in values:
            if _is_composed(key):
                _check_composed(key, value, overrides)
            else:
                _check_point(cfg, {**first, key: value})
    for point in _combinations({key: tried[key] for key in first}):
        _check_point(cfg, {**first, **point})


def _tried_values(rule: Mapping[str, Any]) -> list[Any]:
    """All choices, or the ends of a range and ``low + step``, an integer that may not divide."""
    if "choices" in rule:
        return list(rule["choices"])
    low, high = rule["low"], rule["high"]
    return list(dict.fromkeys([low, min(low + rule.get("step", 1), high), high]))


def _combinations(tried: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Combinations of integers, because sizes may not fit together; a sample if too many."""
    sizes = {key: values for key, values in tried.items() if all(type(v) is int for v in values)}
    combinations = list(itertools.product(*sizes.values()))
    if len(combinations) > _MOST_COMBINATIONS:
        combinations = random.Random(0).sample(combinations, _MOST_COMBINATIONS)
    for values in combinations:
        yield dict(zip(sizes, values, strict=True))


def _is_composed(key: str) -> bool:
    """Whether only Hydra can set this key: a group, or a key that is added."""
    return key.startswith("+") or is_group(key)


def _check_composed(key: str, value: Any, overrides: Sequence[str]) -> None:
    try:
        checked_config(compose_config([*overrides, f"{key}={_text(value)}"]))
    except ConfigError as error:
        reason = str(error).removeprefix(f"{key}={value}: ")
        raise _space_error(f"{key}={value}: {reason}") from error


def _check_point(cfg: DictConfig, point: Mapping[str, Any]) -> None:
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
