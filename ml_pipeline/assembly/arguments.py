"""Arguments of ``train`` as words of the command line: settings, envs, networks and callbacks."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
from torch import nn

from ml_pipeline.assembly.compose import own_folders
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.given import name_of
from ml_pipeline.records import Metrics
from ml_pipeline.shelves import preset_files
from ml_pipeline.training.contracts import Callback, RunningLoop

CallbackFunction = Callable[[RunningLoop, Metrics], bool | None]
AnyCallback = Callback | CallbackFunction
Settings = Mapping[str, object] | None  # of a callback of the config; None removes it
Callbacks = AnyCallback | Sequence[AnyCallback] | Mapping[str, AnyCallback | Settings]


def as_overrides(settings: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Settings as Hydra overrides; a nested mapping sets the keys below its name."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{prefix}{name}.")
        else:
            add = "++" if prefix else ""  # env.kwargs and the like take new keys
            yield f"{add}{prefix}{name}={_hydra_value(value, f'{prefix}{name}')}"


def _hydra_value(value: object, key: str) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_hydra_value(each, key) for each in value)}]"
    text = str(value)
    if _is_object(value):
        raise ConfigError(
            f"{key}={type(value).__name__}: is an object; pass its class, or a function that makes "
            "one: each env and each process makes its own"
        )
    if callable(value):
        text = name_of(value)
    is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text)
    if is_plain and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _is_object(value: object) -> bool:
    return isinstance(value, (gym.Env, gym.vector.VectorEnv, nn.Module))


def env_settings(env: object, config_dir: Path | str | None) -> dict[str, object]:
    """The settings of ``train(env=...)``: an option, an id, a dotted path, or what makes an env."""
    if isinstance(env, str):
        files = [folder / "env" / f"{env}.yaml" for folder in own_folders(config_dir)]
        if env in preset_files("env") or any(file.is_file() for file in files):
            return {"env": env}
        if re.search(r"[/:]|-v\d+$", env):
            return {"env": {"id": env, "target": None}}
        return {"env": {"target": env} if "." in env else env}
    if env is None or isinstance(env, Mapping):
        return {"env": env}
    if callable(env) or _is_object(env):
        return {"env": {"target": env}}
    raise ConfigError(
        f"env={env!r}: pass a name, an id, a class, a function that makes an env, or a dict of "
        "settings"
    )


def network_settings(network: object, *, resumes: bool) -> list[dict[str, object]]:
    """The settings of ``train(network=...)``; a class replaces the arguments of the default one."""
    if isinstance(network, str) and "." in network:
        network = {"_target_": network}
    elif callable(network) or _is_object(network):
        if resumes:  # the stored arguments stay
            return [{"network": {"_target_": network}}]
        network = {"_target_": network}
    if isinstance(network, Mapping) and "_target_" in network:
        return [{"network": "own"}, {"network": network}]
    return [{"network": network}]


class FunctionCallback(Callback):
    """Calls a function with the loop and the metrics after each iteration."""

    def __init__(self, function: CallbackFunction) -> None:
        self.function = function

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> bool | None:
        return self.function(loop, metrics)


def named_callbacks(given: Callbacks | None) -> dict[str, Callback | Settings]:
    """Callbacks by name; those without one are named by their class or function."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {
            name: each if each is None or isinstance(each, Mapping) else _callback(each, name)
            for name, each in given.items()
        }
    several = given if isinstance(given, Sequence) else [given]
    named: dict[str, Callback | Settings] = {}
    for each in several:
        base = re.sub(r"\W", "", str(getattr(each, "__name__", type(each).__name__)))
        name, number = base, 2
        while name in named:
            name, number = f"{base}_{number}", number + 1
        named[name] = _callback(each, name)
    return named


def callback_words(named: Mapping[str, Callback | Settings]) -> Iterator[str]:
    """The settings of callbacks as words of the command line."""
    for name, each in named.items():
        if each is None:
            yield f"~callbacks.{name}"
        elif isinstance(each, Mapping):
            yield from as_overrides({"callbacks": {name: each}})


def _callback(given: Any, name: str) -> Callback:
    if isinstance(given, Callback):
        return given
    if isinstance(given, type):
        raise ConfigError(f"callbacks.{name}: is a class; pass an object: {given.__name__}(...)")
    if not callable(given):
        raise ConfigError(
            f"callbacks.{name}={given!r}: pass an object of an ml_pipeline Callback, or a function "
            "of the loop and the metrics"
        )
    try:
        inspect.signature(given).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"callbacks.{name}: is called as {name}(loop, metrics), but {error}"
        ) from error
    except ValueError:  # a function in C has no signature; calling it tells
        pass
    return FunctionCallback(given)
