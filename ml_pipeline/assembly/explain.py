"""explained: an error of Hydra or OmegaConf as one line, ``key=value: fact; fix``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ml_pipeline.assembly.words import (
    meant,
    needless,
    option_meant,
    option_with,
    value_meant,
    with_sizes,
)
from ml_pipeline.errors import UserError, first_line
from ml_pipeline.shelves import preset_files

_TYPES = {
    **dict.fromkeys(("Integer", "int"), "an integer"),
    **dict.fromkeys(("Float", "float"), "a number"),
    **dict.fromkeys(("Boolean", "bool"), "true or false"),
    **dict.fromkeys(("String", "str"), "a text"),
}

_GROUPS = {
    *("agent", "callbacks", "curriculum", "env", "experiment", "logger"),
    *("network", "opponent", "sweep", "vec_env"),
}

_ENTRIES = {  # keys that name a function or class, with an example
    "agent.loss": "my_module.my_loss",
    "agent.optimizer": "torch.optim.AdamW",
    "agent.advantage": "my_module.my_estimate",
    "agent.on_rollout": "my_module.my_hook",
}


class ConfigError(UserError):
    """The config contains a mistake."""


def explained(error: Exception, words: Sequence[str] = ()) -> str:
    """``words``: the overrides that led to the error."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        return _no_option(str(error.missing_cfg_file), error.options or ())
    if isinstance(error, OverrideParseException) and "==" in str(error.override):
        return f"{error.override}: write {re.sub('==+', '=', str(error.override))}"
    if isinstance(error, OverrideParseException):
        if fix := _parseable(str(error.override)):
            return f"{error.override}: write {fix}"
        return f"{error.override}: expected key=value; quote special characters: 'key=\"value\"'"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name} is not valid YAML: line {mark.line + 1}: {error.problem}"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return _unknown_key(str(error), cause, words)
    if isinstance(cause, ValidationError):
        or_null = ", or null" if _accepts_null(cause) else ""
        value = "null" if cause.value is None else cause.value
        return f"{cause.full_key}={value}: {_wrong_type(cause)}{or_null}{_fix(cause)}"
    if composing := re.match(r"In '(.+?)': .* raised while composing config:\n(.+)", str(error)):
        return _broken_file(*composing.groups())
    if str(error).startswith("Config group override must be a string or a list"):
        return _no_name(words)
    if isinstance(cause, MissingMandatoryValue):
        value = "my_module.MyClass" if str(cause.full_key).endswith("_target_") else "VALUE"
        return f"{cause.full_key}: must be set; write {cause.full_key}={value}"
    if isinstance(cause, ConfigTypeError) and "with ListConfig" in str(cause):
        return f"{cause.full_key}: {_needs_names(str(cause.full_key), cause.value)}"
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
        number = value_meant(key, values)
        one = f"for one number, {number}" if number else f"for a list, '{key}=[{values}]'"
        return f"{key}={values}: several values; for a sweep, write -m {key}={values}; {one}"
    swept = re.match(r"Sweep parameters '(.+)' requires --multirun", str(error))
    if swept:
        several = " ".join(shlex.quote(each) for each in swept[1].split(", "))
        return f"{swept[1]}: several values; for a sweep, write -m {several}"
    if isinstance(error, AssertionError):  # OmegaConf's, for a key below null
        return _below_null(error, words)
    present = re.match(r"Could not append to config. An item is already at '(.+)'", str(error))
    if present:
        return f"+{present[1]}: the key exists; write {present[1]}=... without the +"
    return first_line(cause or error)


def unknown_key(key: str, value: object, known: Sequence[str], config: Mapping[str, object]) -> str:
    """An error for a key that the class of one part of ``config`` does not have."""
    if does := needless(key):
        return f"{key}={value}: unknown key; {does}"
    part, is_inner, _ = key.partition(".")
    correct = {name: config[name] for name in config if is_inner or name in known}
    if is_inner:
        correct[part] = dict.fromkeys(known)
    replacement = meant(key, str(value), correct)
    hint = f"; did you mean {replacement}?" if replacement else _choice(known)
    return f"{key}={value}: unknown key{hint}"


def _unknown_key(
    message: str, cause: ConfigAttributeError | ConfigKeyError, words: Sequence[str]
) -> str:
    appended = re.search(r"\+(\S+=.*)", message)  # "To append to your config use +key=value"
    override = appended[1] if appended else str(cause.full_key)
    key, has_value, value = override.partition("=")
    parent = key.rpartition(".")[0]
    line = f"{override}: unknown key"
    if does := needless(key):
        return f"{line}; {does}"
    config = _config_around(cause.parent_node, words)
    if parent.partition(".")[0] == "curriculum" and not config.get("curriculum"):
        return f"{override}: there is no curriculum; choose or write one: docs/curriculum.md"
    if with_option := option_with(key, value, config):
        return f"{line}; write {with_option}"
    replacement = meant(key, value, config)
    if parent in ("env", "eval_env") and replacement is None:
        name = key.rpartition(".")[2]
        return f"{line}; an argument of the env is +{parent}.kwargs.{name}={value}"
    if parent == "network" and replacement is None:
        for option, file in sorted(preset_files("network").items()):
            if key.removeprefix("network.") in (yaml.safe_load(file.read_text("utf-8")) or {}):
                return f"{line} of this network; write network={option} {override}"
    if replacement not in (None, override):
        line += f"; did you mean {replacement if has_value else str(replacement).rstrip('=')}?"
    else:
        line += _choice([str(each) for each in cause.parent_node or ()])
    is_free_form = cause.object_type is dict and parent != "agent"
    if is_free_form:  # arguments of an env, a network, a callback
        line += f"; to add a key, write +{override}"
    return line


def _below_null(error: AssertionError, words: Sequence[str]) -> str:
    """The error for a key of a group without an option, such as opponent.capacity=9."""
    for word in words:
        key, _, value = word.partition("=")
        group = key.partition(".")[0]
        is_chosen = any(each.startswith(f"{group}=") for each in words)
        if "." in key and not is_chosen and (fix := option_with(key, value, {})):
            return f"{word}: there is no {group}; write {fix}"
    raise error


def _parseable(override: str) -> str | None:
    """An override that Hydra cannot parse, in a form that it can; None for an unclear one."""
    key, _, value = override.partition("=")
    if value.endswith(","):  # seed=3, n_envs=4
        return f"{key}={value.rstrip(',')}"
    if listed := re.fullmatch(r"\(([\w., ]+)\)", value):
        return shlex.quote(f"{key}=[{listed[1].rstrip(', ')}]")
    return value_meant(key, value)


def _fix(cause: ValidationError) -> str:
    """What to write instead of a value that is almost a number; empty for another one."""
    if not any(wanted in _wrong_type(cause) for wanted in ("a number", "an integer")):
        return ""
    fix = None if cause.value is None else value_meant(str(cause.full_key), str(cause.value))
    is_null = fix is not None and fix.endswith("=null")
    return f"; write {fix}" if fix and (_accepts_null(cause) or not is_null) else ""


def _config_around(node: Any, words: Sequence[str]) -> dict[str, object]:
    """The whole config with this node."""
    root = node._get_root() if isinstance(node, Node) else OmegaConf.create({})
    config: Any = OmegaConf.to_container(root, resolve=False)
    return with_sizes(config, words)


def _no_option(path: str, options: Sequence[str]) -> str:
    # Only Hydra's own groups have a slash; env=ALE/Pong-v5 is an option with one.
    group, _, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    options = options or list(preset_files(group))  # Hydra names none for a list, callbacks=[x]
    replacement = option_meant(group, option, options)
    hint = f"; did you mean {replacement}?" if replacement else _choice(options)
    return f"{group}={option}: no such option{hint}"


def _broken_file(name: str, reason: str) -> str:
    """A file that Hydra cannot merge; ``name`` has no suffix."""
    group = name.partition("/")[0]
    if reason.startswith(f"Key '{group}' not in"):
        return f"conf/{name}.yaml: sets keys outside of {group}; begin it with # @package _global_"
    return f"conf/{name}.yaml: {reason}"


def _no_name(words: Sequence[str]) -> str:
    """The error for a group that a word sets to null, a number or a bool."""
    given = dict(word.partition("=")[::2] for word in words)
    for key in sorted(_GROUPS & given.keys()):
        value = given[key]
        if value == "null" and key in ("callbacks", "logger"):
            return f"{key}=null: name the options of this group; for none, {key}=[]"
        if not isinstance(yaml.safe_load(value), (str, list)):
            return f"{key}={value}: name an option of this group; --help lists them"
    return "an option of a group must be a string; --help lists them"


def _choice(known: Sequence[str]) -> str:
    return f"; choose from {', '.join(known)}" if known else ""


def _accepts_null(cause: ValidationError) -> bool:
    parent = cause.parent_node
    if not isinstance(parent, DictConfig) or cause.key is None:
        return False
    child = parent._get_node(cause.key)
    return child is not None and not isinstance(child, list) and child._is_optional()


def _wrong_type(cause: ValidationError) -> str:
    message = str(cause)
    if "is not a valid bool" in message:
        return "must be true or false"
    if "is not a ListConfig" in message:
        return "must be a list, as in [a,b]"
    if "to Dict[" in message:
        return _needs_names(str(cause.full_key), cause.value)
    if "is not Optional" in message:
        return _needed_type(cause)
    named = re.search(r"could not be converted to (\w+)|for field of type '(\w+)'", message)
    wanted = (named[1] or named[2]) if named else ""
    return f"must be {_TYPES[wanted]}" if wanted in _TYPES else message.splitlines()[0]


def _needs_names(key: str, value: object) -> str:
    """The rule of a mapping that got another value."""
    if key in _ENTRIES:
        path = str(value) if re.fullmatch(r"\w+(\.\w+)+", str(value)) else _ENTRIES[key]
        return f"must have a _target_; write {key}._target_={path}"
    entry = "_target_=my_module.MyWrapper" if key.endswith("wrappers") else "3"
    dot = "." if key.endswith("wrappers") else "="
    return f"must map names to values; write +{key}.my_name{dot}{entry}"


def _needed_type(cause: ValidationError) -> str:
    """The rule of a field that refused null."""
    parent = cause.parent_node
    child = parent._get_node(cause.key) if isinstance(parent, DictConfig) else None
    if isinstance(child, DictConfig):
        return "must be a mapping; for none, {}"
    if isinstance(child, ListConfig):
        return "must be a list; for none, []"
    name = getattr(child._metadata.ref_type, "__name__", "") if isinstance(child, Node) else ""
    return f"must be {_TYPES.get(name, 'set')}"
