"""explained: an error of Hydra or OmegaConf as one line, ``key=value: fact; fix``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from ml_pipeline.errors import UserError, first_line

_TYPES = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}


class ConfigError(UserError):
    """The config contains a mistake."""


def explained(error: Exception) -> str:
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={option}: no such option" + _choice(option, error.options or ())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: expected key=value; quote special characters: 'key=\"value\"'"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return _unknown_key(str(error), cause)
    if isinstance(cause, ValidationError):
        or_null = ", or null" if _accepts_null(cause) else ""
        return f"{cause.full_key}={cause.value}: {_wrong_type(str(cause))}{or_null}"
    if isinstance(cause, InterpolationKeyError):
        return f"{cause.full_key}: {first_line(cause)}"
    if str(error).startswith("Only one of --run"):
        return "-m: cannot be combined with --cfg, --info or --run; leave one of them out"
    folder = re.match(r"Additional config directory '(.*)' not found", str(error))
    if folder:
        return f"--config-dir {folder[1]}: no such folder"
    ambiguous = re.match(r"Ambiguous value for argument '(.+?)=(.*)'", str(error))
    if ambiguous:
        key, values = ambiguous.groups()
        return f"{key}={values}: several values; add -m for a sweep, or write '{key}=[{values}]'"
    present = re.match(r"Could not append to config. An item is already at '(.+)'", str(error))
    if present:
        return f"+{present[1]}: the key exists; write {present[1]}=... without the +"
    return first_line(cause or error)


def unknown_key(key: str, value: object, known: Sequence[str]) -> str:
    """An error for a key that a config class does not have."""
    parent, dot, name = key.rpartition(".")
    return f"{key}={value}: unknown key{_choice(name, known, parent + dot)}"


def _unknown_key(message: str, cause: ConfigAttributeError | ConfigKeyError) -> str:
    appended = re.search(r"\+(\S+=.*)", message)  # "To append to your config use +key=value"
    override = appended[1] if appended else cause.full_key
    parent, dot, name = str(cause.full_key).rpartition(".")
    known = [str(key) for key in cause.parent_node or ()]
    line = f"{override}: unknown key{_choice(name, known, parent + dot)}"
    is_free_form = cause.object_type is dict and parent != "agent"
    if is_free_form:  # arguments of an env, a network, a callback
        line += f"; to add a key, write +{override}"
    return line


def _choice(word: str, known: Sequence[str], prefix: str = "") -> str:
    close = get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; choose from {', '.join(known)}" if known else ""


def _accepts_null(cause: ValidationError) -> bool:
    parent = cause.parent_node
    if not isinstance(parent, DictConfig) or cause.key is None:
        return False
    child = parent._get_node(cause.key)
    return child is not None and not isinstance(child, list) and child._is_optional()


def _wrong_type(message: str) -> str:
    if "is not a valid bool" in message:
        return "must be true or false"
    if "is not a ListConfig" in message:
        return "must be a list, as in [a,b]"
    wanted = re.search(r"could not be converted to (\w+)", message)
    if wanted and wanted[1] in _TYPES:
        return f"must be {_TYPES[wanted[1]]}"
    return message.splitlines()[0]
