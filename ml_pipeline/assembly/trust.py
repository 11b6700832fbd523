"""Trust: a config or a policy file of someone else imports only parts of known packages.

A class that is named in a file runs when it is imported and made. A file that this user signed
may name any class, as the command line may. Any other file may name the parts of ml_pipeline,
gymnasium, torch.nn and torch.optim that fit their place, and ids that installed packages register.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from ml_pipeline.moved import moved
from ml_pipeline.runs.signatures import UntrustedError
from ml_pipeline.targets import import_dotted
from ml_pipeline.training.contracts import Algorithm, Callback

_PACKAGES = ("ml_pipeline", "gymnasium", "torch.nn", "torch.optim")
_ENV_KEYS = ("env", "eval_env")
_WRITERS = ("gymnasium.wrappers.rendering.RecordVideo",)  # write files into a folder of the config

Path = tuple[str, ...]  # of a config key: ("network", "encoder", "_target_")


_FOLDER = re.compile(r"(.+_)?(dir|folder)")  # keys of an env that name where it writes
_LOGGER = r"logger/[^/]+/_target_"
_TERM = r"(eval_)?env/wrappers/[^/]+/terms/[^/]+/_target_"  # of RewardShaping: a function
# The modules whose functions a config may name; others of the package may write files.
_AGENT_PART = r"ml_pipeline\.(training\.returns|algorithms\.\w+\.(loss|ideas\.\w+))"
_SCHEDULE = r"agent/\w+_schedule"  # a word, or the dotted path of a function
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
_NETWORK = r"network/(.+/)?_target_"
_NETWORK_MODULE = "ml_pipeline.policy.auto_network"
_TERM_MODULE = r"ml_pipeline\.(envs\.wrappers\.\w+|worlds\.\w+\.shaping_terms)"


def check_names(
    config: Mapping[str, object], source: object, *, typed: Sequence[Path] = ()
) -> None:
    """Raise ``UntrustedError`` if a stored config names a part that can run code of its author.

    ``source`` is the file. The user has typed the values at and below the keys ``typed``.
    """
    for path, name in _names(config, ()):
        if not any(path[: len(key)] == key for key in typed):
            _check_name(path, name, source)
    for path, folder in _folders(config, ()):
        if not any(path[: len(key)] == key for key in typed):
            raise UntrustedError(
                f"{source}: {'.'.join(path)}={folder}: names a folder to write into, and this user "
                "did not write the file, or it has changed since; if you trust its author, add "
                "--trust (with resume=: trust=true)"
            )


def _folders(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """The keys of the envs that name folders, and their values."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if path or key in _ENV_KEYS:
                yield from _folders(part, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _folders(part, (*path, str(index)))
    elif value is not None and path and _FOLDER.fullmatch(path[-1]):
        yield path, value


def check_algorithm(config: Mapping[str, object], source: object) -> None:
    """Only check agent.algorithm, the one name that reading a config imports."""
    for path, name in _names(config, ()):
        if path == ("agent", "algorithm"):
            _check_name(path, name, source)


def _names(value: object, path: Path, *, in_entry: bool = False) -> Iterator[tuple[Path, str]]:
    """The keys that name something to import, and their values.

    ``in_entry``: below a ``_target_`` of the agent, whose arguments may be dotted paths too.
    """
    if isinstance(value, Mapping):
        in_entry = in_entry or (path[:1] == ("agent",) and "_target_" in value)
        for key, part in value.items():
            yield from _names(part, (*path, str(key)), in_entry=in_entry)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _names(part, (*path, str(index)), in_entry=in_entry)
    elif value is not None and (_names_a_part(path) or _may_name(value, path, in_entry)):
        yield path, str(value)


def _may_name(value: object, path: Path, in_entry: bool) -> bool:
    is_dotted = isinstance(value, str) and re.fullmatch(_DOTTED, value) is not None
    return is_dotted and (in_entry or re.fullmatch(_SCHEDULE, "/".join(path)) is not None)


def _names_a_part(path: Path) -> bool:
    is_env = len(path) == 2 and path[0] in _ENV_KEYS and path[1] in ("id", "target")
    return is_env or path[-1:] == ("_target_",) or path == ("agent", "algorithm")


def _check_name(path: Path, name: str, source: object) -> None:
    known = _is_known_id(name) if path[-1] == "id" else _is_known_part(path, name)
    if not known:
        raise UntrustedError(
            f"{source}: {'.'.join(path)}={name}: is not a part of {', '.join(_PACKAGES)} that "
            "fits here, so it can run any code, and this user did not write the file, or it has "
            "changed since; if you trust its author, add --trust (with resume=: trust=true)"
        )


def _is_known_id(env_id: str) -> bool:
    module, _, name = env_id.rpartition(":")
    # Gymnasium's compatibility envs import the env that their arguments name.
    return (not module or _is_known_module(module)) and not name.startswith("GymV2")


def _is_known_part(path: Path, name: str) -> bool:
    """Whether ``name`` is a class of the right kind; imports it only from a known package."""
    key = "/".join(part.replace("/", " ") for part in path)
    if not _is_known_module(moved(name).rpartition(".")[0]):
        return False
    found = import_dotted(name, key=".".join(path))
    if path == ("agent", "algorithm"):
        return isinstance(found, Algorithm)
    defined_in = str(getattr(found, "__module__", ""))
    if path[0] == "agent" and re.fullmatch(_AGENT_PART, defined_in):
        return True  # parts of an algorithm may be functions
    if re.fullmatch(_NETWORK, key) and defined_in == _NETWORK_MODULE:
        return True
    if re.fullmatch(_TERM, key):
        return re.fullmatch(_TERM_MODULE, defined_in) is not None
    # A module also has the names that it imports: judge a class by where it was defined.
    if not isinstance(found, type) or not _is_known_module(found.__module__):
        return False
    if f"{found.__module__}.{found.__name__}" in _WRITERS:
        return False
    if re.fullmatch(_LOGGER, key):
        return found.__module__.startswith("ml_pipeline.runs.") and hasattr(found, "log")
    return any(re.fullmatch(place, key) and issubclass(found, b) for place, b in _bases().items())


@cache
def _bases() -> dict[str, tuple[type, ...]]:
    """Which classes fit which keys; "/" separates the parts of a key."""
    # Spawned workers import this module through the entry script: keep torch out of it.
    import gymnasium as gym
    from torch import nn, optim

    from ml_pipeline.envs.tensor_env import DeviceVectorEnv

    return {
        r"(eval_)?env/target": (gym.Env, DeviceVectorEnv),
        r"(eval_)?env/wrappers/[^/]+/_target_": (gym.Wrapper,),
        _NETWORK: (nn.Module,),
        r"agent/.+/_target_": (optim.Optimizer,),
        r"callbacks/[^/]+/_target_": (Callback,),
    }


def _is_known_module(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _PACKAGES)
