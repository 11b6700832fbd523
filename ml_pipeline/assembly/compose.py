"""The config of a run: composed by Hydra, read from a run folder, and checked."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins import file_config_source
from hydra._internal.core_plugins import (
    importlib_resources_config_source as pkg_config_source,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ml_pipeline.assembly.agent import config_class, find_algorithm, settings_class, typed
from ml_pipeline.assembly.explain import ConfigError as ConfigError
from ml_pipeline.assembly.explain import explained, unknown_key
from ml_pipeline.assembly.trust import check_algorithm, check_names
from ml_pipeline.assembly.words import check_order
from ml_pipeline.config.curriculum import CurriculumConfig
from ml_pipeline.config.train import RUN_ROOT, TrainConfig
from ml_pipeline.errors import UserError, first_line, shorten
from ml_pipeline.foreign import TEXT_BYTES, read_regular
from ml_pipeline.runs.console import say
from ml_pipeline.runs.run_folder import RunFolder, check_yaml
from ml_pipeline.runs.signatures import is_signed, report_change, sealed, unsealed
from ml_pipeline.shelves import CONF, conf_folders

_PURPOSE = "config"  # of the signature
_SEED_LINE = re.compile(rb"^seed: (\d{1,9})\n", re.MULTILINE)  # all are valid
# What plain_config has read and checked: all but the seed, whether it is signed, and ``trust``.
_configs: dict[tuple[bytes, bool, bool], TrainConfig] = {}
_MOST_CONFIGS = 100  # a longer sweep over one key checks each config anyway
# What Hydra raises for a mistake in the config; for a key below null, OmegaConf asserts.
COMPOSE_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    yaml.YAMLError,
    AssertionError,
)
# By the start of an env's id: its file in conf/env.
_PRESETS_OF_ENVS = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
_OPEN = "++"  # Hydra's prefix of a key that may be new
# Entries whose keys are those of a function or class that the user names.
_ENTRIES = tuple(
    f"{name}."
    for name in (
        "network.critic",
        *(f"agent.{each}" for each in ("loss", "optimizer", "advantage", "on_rollout")),
        "agent.obs_groups",
    )
)


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose conf/ and ``overrides`` with Hydra, which refuses unknown keys and wrong types."""
    check_order(overrides)
    store_schema()
    # The caller may be a Hydra program itself, and Hydra is a singleton.
    callers = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            words = [*preset_of_env(overrides), *overrides, *own_conf(overrides)]
            return compose("train", overrides=opened(words))
    except COMPOSE_ERRORS as error:
        raise ConfigError(explained(error, overrides)) from error
    finally:
        GlobalHydra.instance().hydra = callers


def store_schema() -> None:
    """Let Hydra find the schema of conf/train.yaml, the conf/ of shelves, and dataclasses."""
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    if _ShelfConfigs not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(_ShelfConfigs)
    for source in (ClassDefaults, FileConfigSource, ImportlibResourcesConfigSource):
        SourcesRegistry.instance().types[source.scheme()] = source


class _ShelfConfigs(SearchPathPlugin):
    """Lets Hydra also search the conf/ of every world and algorithm, and dataclasses."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders():
            search_path.append(provider="ml_pipeline", path=f"file://{folder}")
        search_path.append(provider="ml_pipeline", path=f"{ClassDefaults.scheme()}://")


class FileConfigSource(file_config_source.FileConfigSource):
    """YAML files in a folder; replaces Hydra's class, so it has its name.

    A job of a sweep registers Hydra's classes again, and Hydra skips names that it knows.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        return _with_defaults(config_path, super().load_config(config_path))


class ImportlibResourcesConfigSource(pkg_config_source.ImportlibResourcesConfigSource):
    """YAML files in a package; replaces Hydra's class."""

    def load_config(self, config_path: str) -> ConfigResult:
        return _with_defaults(config_path, super().load_config(config_path))


def _with_defaults(config_path: str, found: ConfigResult) -> ConfigResult:
    """Let the file of an agent extend the defaults of its config class, so it can leave them out.

    They come first in its defaults list: any other file that it extends takes precedence.
    """
    group, _, option = config_path.removesuffix(".yaml").rpartition("/")
    file = found.config
    if group == "agent" and isinstance(file, DictConfig) and file.get("algorithm"):
        # Hydra refuses a path that occurs twice, so the path also names the file.
        defaults = f"/{ClassDefaults.scheme()}/{option}/{file.algorithm}@_here_"
        file.defaults = [defaults, *file.get("defaults", ())]
    return found


class ClassDefaults(ConfigSource):
    """Configs without a file: ``class/DOTTED`` is a dataclass, or an algorithm with its class.

    A file extends one by ``defaults: [/class/DOTTED@_here_]``.
    """

    @staticmethod
    def scheme() -> str:
        return "class"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, dotted = config_path.removesuffix(".yaml").rpartition("/")
        key = self.scheme() if group == self.scheme() else "agent.algorithm"
        find_modules_in_cwd()  # it may be the user's own
        defaults = OmegaConf.create(_defaults(config_class(dotted, key)))
        return ConfigResult(self.provider, self.full_path(), defaults, {"package": None})

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(f"{self.scheme()}/")

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _defaults(dataclass: type) -> dict[str, object]:
    """The default of each field; ``???``, which Hydra asks the user for, if it has none."""
    return {
        each.name: each.default_factory()
        if each.default_factory is not dataclasses.MISSING
        else getattr(dataclass, each.name, "???")
        for each in dataclasses.fields(dataclass)
    }


def preset_of_env(words: Sequence[str]) -> list[str]:
    """The override env= for ids of a package that has a file in conf/env, or none.

    A resumed run keeps the wrappers that it has.
    """
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        values[key.lstrip("+")] = value.strip("'")
    if {"env", "experiment", "resume"} & values.keys():
        return []
    names = values.get("env.id", "").split(",")
    for start, option in _PRESETS_OF_ENVS.items():
        if all(name.strip("' ").rpartition(":")[2].startswith(start) for name in names):
            return [f"env={option}"]
    return []


def opened(words: Sequence[str]) -> list[str]:
    """Let Hydra accept the keys of an entry that names the user's own function.

    Also every key of agent if its file does not decide which keys exist: with resume= the stored
    run decides, and with agent.algorithm= the class of that algorithm. ``checked_config`` checks
    the keys.
    """
    is_any = any(word.startswith(("resume=", "agent.algorithm=")) for word in words)
    free = ("agent.", *_ENTRIES) if is_any else _ENTRIES
    return [f"{_OPEN}{word}" if word.startswith(free) else word for word in words]


def as_typed(words: Sequence[str]) -> list[str]:
    """The overrides as the user typed them, without what ``opened`` added."""
    marks = tuple(f"{_OPEN}{name}" for name in ("agent.", *_ENTRIES))
    return [word.removeprefix(_OPEN) if word.startswith(marks) else word for word in words]


def own_conf(arguments: Sequence[str]) -> list[str]:
    """The override that lets Hydra also search conf/ of the current folder, if there is one."""
    if any(each.startswith("hydra.searchpath") for each in arguments):
        return []
    return _searching(own_folders(None))


def with_config_dir(config_dir: Path | str | None) -> list[str]:
    """The override that lets Hydra also search ``config_dir``; none for None."""
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise ConfigError(f"config_dir={config_dir}: no such folder")
    return _searching(own_folders(config_dir))


def own_folders(config_dir: Path | str | None) -> list[Path]:
    """The user's config folders, the first one first: ``config_dir`` and conf/ in this folder."""
    folders = {Path(each).resolve(): None for each in (config_dir, "conf") if each is not None}
    return [each for each in folders if each.is_dir() and not each.samefile(CONF)]


def _searching(folders: Sequence[Path]) -> list[str]:
    # Quoted for Hydra, whose strings escape only the quote.
    quoted = ("'file://{}'".format(str(folder).replace("'", "\\'")) for folder in folders)
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if folders else []


def checked_config(cfg: DictConfig, *, imports_algorithm: bool = True) -> TrainConfig:
    """The config as checked dataclasses; agent.algorithm chooses the class of ``agent``.

    Without ``imports_algorithm``, a class in config.py beside the algorithm is enough.
    """
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for key in cfg:
        if key not in known:
            raise ConfigError(unknown_key(str(key), cfg[key], known, _container(cfg)))
    agent_class = find_algorithm(cfg).config if imports_algorithm else settings_class(cfg)
    curriculum = None
    try:
        agent = typed("agent", agent_class, cfg)
        if cfg.curriculum is not None:
            if OmegaConf.is_list(OmegaConf.select(cfg, "curriculum.phases")):
                raise ConfigError("curriculum.phases is a list; write phases: {NAME: {...}, ...}")
            curriculum = typed("curriculum", CurriculumConfig, cfg)
        others = {str(key): _plain(cfg[key]) for key in cfg if key not in ("agent", "curriculum")}
        for entries in (others["callbacks"], others["logger"], others["env"].wrappers):
            for name in [name for name, entry in entries.items() if entry is None]:
                del entries[name]  # callbacks.evaluation=null
        return TrainConfig(**others, agent=agent, curriculum=curriculum)
    except OmegaConfBaseException as error:
        raise ConfigError(explained(error)) from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(str(error)) from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def with_newest_run(words: Sequence[str]) -> list[str]:
    """The overrides with the path of the newest run in resume=latest, unless a file has that name.

    The path, because every part of a run reads the key, and another run may start meanwhile.
    """
    for word in words:
        if re.fullmatch("resume=(true|yes|on|1|last|newest|auto)", word, re.I):
            raise ConfigError(f"{word}: for the run started last, write resume=latest")
    if "resume=latest" not in words or Path("latest").exists():
        return list(words)
    from ml_pipeline.analysis.listing import newest_run

    roots = [word.partition("=")[2] for word in words if word.startswith("run_root=")]
    with errors_of_resume("latest"):
        newest = newest_run(Path(roots[-1] if roots else RUN_ROOT))
    return [f"resume={newest.path}" if word == "resume=latest" else word for word in words]


def resumed_folder(path: str, *, trust: bool) -> RunFolder:
    """The run folder that resume= names."""
    with errors_of_resume(path):
        return RunFolder.open(path, trust=trust)


@contextmanager
def errors_of_resume(path: str) -> Iterator[None]:
    """Let the errors of a wrong run folder begin with the key that names it."""
    try:
        yield
    except UserError as error:
        raise ConfigError(f"resume={shorten(path, 300)}: {error}") from error


def resumed_config(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config of the run to resume, changed only where this command line says so."""
    run_folder = resumed_folder(str(cfg.resume), trust=cfg.trust)
    with errors_of_resume(str(cfg.resume)):
        base, is_own = _read_config(run_folder)
    named = [
        each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))
    ]
    if "experiment" in named:
        raise ConfigError("experiment= cannot be combined with resume=; name single keys")
    if "init_from" in named:
        raise ConfigError("init_from= cannot be combined with resume=; choose one of them")
    # Never from the folder: otherwise its author decides whether to trust it.
    base.trust = cfg.trust
    base.salvage = cfg.salvage
    if "total_steps" in named and "num_episodes" not in named:
        base.num_episodes = None  # the command line replaces the stored goal
    typed = [tuple(key.split(".")) for key in named]
    with open_dict(base):
        if not (is_own or cfg.trust):
            _drop_loggers(base, run_folder, typed)
        for key in named:
            if not key.startswith("hydra"):
                _take_over(base, cfg, key)
    if not (is_own or cfg.trust):
        check_names(_container(base), run_folder.config, typed=typed)
    return base


def _drop_loggers(
    base: DictConfig, run_folder: RunFolder, typed: Sequence[tuple[str, ...]]
) -> None:
    """Remove the loggers that another user chose: they may send what this user trains."""
    loggers = _container(base).get("logger")
    if not isinstance(loggers, dict) or not loggers:
        return
    check_names({"logger": loggers}, run_folder.config, typed=typed)
    base.logger = {}
    if ("logger",) not in typed:
        say(
            f"{run_folder.path}: another user chose its loggers, {', '.join(map(str, loggers))}; "
            "they are off; add logger=NAME to use your own"
        )


def _take_over(base: DictConfig, cfg: DictConfig, key: str) -> None:
    """Copy ``key`` from ``cfg`` to ``base``, or delete it there."""
    parent, _, name = key.rpartition(".")
    if parent and OmegaConf.select(base, parent) is None:
        # logger.wandb.mode=... for a run without W&B: it needs all of logger.wandb.
        _take_over(base, cfg, parent)
        return
    old = OmegaConf.select(base, parent) if parent else base
    new = OmegaConf.select(cfg, parent) if parent else cfg
    if new is not None and name in new:
        old[name] = new[name]
    elif name in old:
        del old[name]


def stored_config(
    run_folder: RunFolder,
    *,
    check: Callable[[Mapping[str, object], object], None] = check_names,
    imports_algorithm: bool = True,
) -> TrainConfig:
    """A run's config.yaml, checked; refuses code of other people unless the folder is trusted.

    ``check`` refuses it, for the parts of the config that the caller will import.
    """
    cfg, is_own = _read_config(run_folder)
    if is_own or run_folder.trust:
        find_modules_in_cwd()
    else:
        check(_container(cfg), run_folder.config)
    return checked_config(cfg, imports_algorithm=imports_algorithm)


def plain_config(path: Path | str, *, trust: bool = False) -> dict[str, Any]:
    """A run's config as nested dicts; imports nothing but the class of ``agent``.

    Runs often differ only in their seed: then the rest is read and checked once.
    """
    run_folder = RunFolder.open(path, trust=trust)
    try:
        content = read_regular(run_folder.config, most_bytes=TEXT_BYTES)
    except (UserError, OSError):
        content = b""  # stored_config reports it
    seeds = _SEED_LINE.findall(content)
    shared = _SEED_LINE.sub(b"", unsealed(content))
    key = shared, _is_own(run_folder.config, content), trust
    config = _configs.get(key) if len(seeds) == 1 else None
    if config is None:
        config = stored_config(run_folder, check=check_algorithm, imports_algorithm=False)
        if len(seeds) == 1 and config.seed == int(seeds[0]):
            if len(_configs) >= _MOST_CONFIGS:
                del _configs[next(iter(_configs))]  # the oldest
            _configs[key] = config
    else:
        config = dataclasses.replace(config, seed=int(seeds[0]))
    return dataclasses.asdict(config)


def _read_config(run_folder: RunFolder) -> tuple[DictConfig, bool]:
    """A run's config.yaml under today's schema, and whether this user wrote it."""
    path = run_folder.config
    try:
        content = read_regular(path, most_bytes=TEXT_BYTES)
        text = content.decode("utf-8")
        check_yaml(text)
        stored = OmegaConf.create(text)
        _refuse_interpolations(OmegaConf.to_container(stored, resolve=False), "")
        older = {"env_seeds": "adjacent"}  # before the key existed
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), older, stored)
    except Exception as error:  # the file may hold anything
        is_schema = isinstance(error, OmegaConfBaseException)
        reason = explained(error) if is_schema else first_line(error, n_lines=2)
        raise ConfigError(f"{path}: not the config of a run: {reason}") from error
    if not isinstance(merged, DictConfig) or not merged.network:
        raise ConfigError(f"{path}: not the config of a run: it names no network")
    return merged, _is_own(path, content)


def _is_own(path: Path, content: bytes) -> bool:
    """Whether this user wrote a config; prints a line if it has changed since it was written."""
    if is_signed(_PURPOSE, content):
        return True
    report_change(path, content)
    return False


def _refuse_interpolations(value: object, key: str) -> None:
    """A run stores plain values; ``${oc.env:NAME}`` would read a variable of the reader."""
    if isinstance(value, dict):
        for name, part in value.items():
            _refuse_interpolations(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in value:
            _refuse_interpolations(part, key)
    elif isinstance(value, str) and "${" in value:
        raise ValueError(f"{key}={value}: interpolations are not allowed here; write the value")


def _container(cfg: DictConfig) -> dict[str, object]:
    return cast("dict[str, object]", OmegaConf.to_container(cfg, resolve=False))


def stored_text(config: TrainConfig) -> str:
    """The text of config.yaml: everything that decides the run, except what it resumed."""
    values = {**dataclasses.asdict(config), "resume": None, "trust": False, "salvage": False}
    return sealed(_PURPOSE, OmegaConf.to_yaml(OmegaConf.create(values)))


def find_modules_in_cwd() -> None:
    """Let users' own modules be imported from the current folder."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
