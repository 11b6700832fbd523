"""The search space of a study: a YAML of config keys, checked before a trial begins.

Each key has ``low`` and ``high`` (with ``log`` or ``step``), or ``choices``. A range whose numbers
are all whole gives whole numbers.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from yaml import YAMLError

from ml_pipeline.door.compose import CONF, ConfigError, checked_config, compose_config

Space = dict[str, dict[str, Any]]

_RANGE_KEYS = {"low", "high", "log", "step"}
_MOST_PAIRS = 100_000


def read_space(name: str) -> Space:
    """``name`` is a file of conf/study/, or the path of a YAML."""
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if is_path else CONF / "study" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in path.parent.glob("*.yaml")))
        raise ConfigError(
            f"space={name}: there is no {path}" + (f"; there are: {known}" if known else "")
        )
    try:
        space = OmegaConf.to_container(OmegaConf.load(path))  # reads 1e-5 as a number
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"space={name} cannot be read: {one_line(error)}") from error
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"space={name}: {path} names no key")
    for key, rule in space.items():
        _check_rule(str(key), rule)
    return {str(key): dict(rule) for key, rule in space.items()}


def _check_rule(key: str, rule: Any) -> None:
    """Whether a rule can be drawn from at all."""
    if not isinstance(rule, dict):
        raise _space_error(key, f"needs low and high, or choices, got {rule}")
    if "choices" in rule:
        choices = rule["choices"]
        if set(rule) != {"choices"}:
            raise _space_error(key, f"has choices, and besides {sorted(set(rule) - {'choices'})}")
        if not isinstance(choices, list) or not choices:
            raise _space_error(key, f"needs a list of choices, got {choices}")
        for choice in choices:
            if isinstance(choice, dict):
                raise _space_error(key, f"can choose among values and lists, got {choice}")
        labels = [_label(choice) for choice in choices]
        if len(set(map(repr, labels))) < len(labels):
            raise _space_error(key, f"has a choice twice: {choices}")
        return
    unknown = sorted(set(rule) - _RANGE_KEYS)
    if unknown or not {"low", "high"} <= set(rule):
        raise _space_error(key, f"needs low and high, or choices, got {sorted(rule)}")
    for name in ("low", "high", "step"):
        value = rule.get(name, 1)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise _space_error(key, f"{name} must be a number, got {value}")
    if not isinstance(rule.get("log", False), bool):
        raise _space_error(key, f"log must be true or false, got {rule['log']}")
    if rule["low"] > rule["high"]:
        raise _space_error(key, f"low {rule['low']} is above high {rule['high']}")
    if rule.get("log") and "step" in rule:
        raise _space_error(key, "can have log or step, not both")
    if rule.get("log") and rule["low"] <= 0:
        raise _space_error(key, f"low must be positive where log is true, got {rule['low']}")
    if rule.get("step", 1) <= 0:
        raise _space_error(key, f"step must be positive, got {rule['step']}")


def _space_error(key: str, fact: str) -> ConfigError:
    return ConfigError(f"search space: {key} {fact}")


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's words."""
    return {key: _distribution(rule) for key, rule in space.items()}


def _distribution(rule: Mapping[str, Any]) -> BaseDistribution:
    if "choices" in rule:
        return CategoricalDistribution([_label(choice) for choice in rule["choices"]])
    low, high, log = rule["low"], rule["high"], rule.get("log", False)
    if _is_whole(rule):
        return IntDistribution(low, high, log=log, step=rule.get("step", 1))
    return FloatDistribution(float(low), float(high), log=log, step=rule.get("step"))


def _is_whole(rule: Mapping[str, Any]) -> bool:
    return all(isinstance(rule.get(name, 1), int) for name in ("low", "high", "step"))


def _label(choice: Any) -> Any:
    """Optuna chooses among plain values only: a list goes by its text."""
    return json.dumps(choice) if isinstance(choice, list) else choice


def param_overrides(space: Space, params: Mapping[str, Any]) -> list[str]:
    """Drawn values as overrides for Hydra."""
    overrides = []
    for key, value in params.items():
        if "choices" in space[key]:
            value = next(
                each for each in space[key]["choices"] if repr(_label(each)) == repr(value)
            )
        overrides.append(f"{key}={_text(value)}")
    return overrides


def _text(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def check_space(space: Space, overrides: Sequence[str]) -> None:
    """Refuse a space with a key, a value or a pair of values that no trial could train with."""
    with hydra_explained():
        base = compose_config(overrides)
    checked_config(base)
    for key, rule in space.items():
        node = OmegaConf.select(base, key.lstrip("+"))
        if node is None and not key.startswith("+") and not _has(base, key):
            raise _space_error(key, "is no key of the config")
        for value in rule.get("choices", [rule.get("low"), rule.get("high")]):
            try:
                _check_value(base, overrides, key, value)
            except ConfigError as error:
                raise _space_error(key, f"cannot be {value}: {one_line(error)}") from error
    _check_fit(base, space)


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and name in node


def _check_value(base: DictConfig, overrides: Sequence[str], key: str, value: Any) -> None:
    if key.startswith("+") or isinstance(OmegaConf.select(base, key), DictConfig):  # a group
        with hydra_explained():
            checked_config(compose_config([*overrides, f"{key}={_text(value)}"]))
        return
    cfg = copy.deepcopy(base)
    with hydra_explained():
        # Whether a rollout cuts into equal minibatches is looked at for all values together.
        cfg.agent.n_minibatches = 1
        if key == "agent.n_minibatches" and isinstance(value, int) and value > 0:
            cfg.agent.n_steps = value
        OmegaConf.update(cfg, key, value)
        checked_config(cfg)


def _check_fit(base: DictConfig, space: Space) -> None:
    """All n_steps with all n_minibatches: a rollout is cut into equal parts."""
    keys = ("agent.n_steps", "n_envs", "agent.n_minibatches")
    values = [
        _values(space[key]) if key in space else [OmegaConf.select(base, key)] for key in keys
    ]
    if math.prod(map(len, values)) > _MOST_PAIRS or "auto" in values[1]:
        return
    for n_steps, n_envs, n_minibatches in itertools.product(*values):
        if (n_steps * n_envs) % n_minibatches:
            raise _space_error(
                "agent.n_minibatches",
                f"can be {n_minibatches}, which cuts a rollout of agent.n_steps {n_steps} x n_envs "
                f"{n_envs} into unequal parts; choose powers of two, n_steps above n_minibatches",
            )


def _values(rule: Mapping[str, Any]) -> Sequence[Any]:
    if "choices" in rule:
        return list(rule["choices"])
    return range(rule["low"], rule["high"] + 1, rule.get("step", 1))


@contextmanager
def hydra_explained() -> Iterator[None]:
    """What Hydra refuses is a user's mistake, told in one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) if lines else type(error).__name__
