"""A train_*.py refuses presets and runs of another agent by name, before Hydra sees their keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ml_pipeline.assembly.compose import CONF, ConfigError, preset_files
from ml_pipeline.errors import UserError
from ml_pipeline.moved import moved
from ml_pipeline.runs.run_folder import RunFolder, check_yaml
from ml_pipeline.targets import ALGORITHM_OF_OLD_RUNS


def default_agent() -> str:
    """The option of agent= in conf/train.yaml."""
    groups = (each for each in _defaults(CONF / "train.yaml") if isinstance(each, dict))
    return next(str(each["agent"]) for each in groups if "agent" in each)


def check_presets(words: Sequence[str], agent: str) -> None:
    """Refuse ``experiment=NAME`` of ours if it trains another agent; a user's own are not read."""
    for name in _values(words, "experiment"):
        wanted = _agent_of(name)
        if wanted is not None and wanted != agent:
            raise ConfigError(f"experiment={name}: trains agent={wanted}; use train_{wanted}.py")


def check_resumed(words: Sequence[str], agent: str) -> None:
    """Refuse ``resume=RUN`` of another agent of ours; every door resumes a user's own algorithm."""
    for path in _values(words, "resume"):
        trained = _agent_of_run(path)
        if trained is not None and trained != agent:
            raise ConfigError(f"resume={path}: trains agent={trained}; use train_{trained}.py")


def _values(words: Sequence[str], key: str) -> list[str]:
    """The values of ``key`` on the command line, without Hydra's quotes; several in a sweep."""
    pairs = (word.partition("=") for word in words)
    return [each.strip("'\"") for name, _, text in pairs if name == key for each in text.split(",")]


def _agent_of(name: str) -> str | None:
    """The agent of an experiment or of the one that it extends; None for an unknown name."""
    path = preset_files("experiment").get(name)
    if path is None:
        return None
    agent = default_agent()
    for entry in _defaults(path):
        if isinstance(entry, str):
            agent = _agent_of(entry) or agent
        else:
            agent = entry.get("override /agent", agent)
    return agent


def _agent_of_run(path: str) -> str | None:
    """The agent of a run folder; None if it is not ours, or for a folder that cannot be read."""
    try:
        text = RunFolder.open(path).config.read_text(encoding="utf-8")
        check_yaml(text)
        config = yaml.safe_load(text)
    except (UserError, OSError, ValueError, yaml.YAMLError):
        return None  # the resume reports it
    settings = config.get("agent") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return None
    algorithm = moved(str(settings.get("algorithm") or ALGORITHM_OF_OLD_RUNS))
    for option, file in preset_files("agent").items():
        if yaml.safe_load(file.read_text(encoding="utf-8")).get("algorithm") == algorithm:
            return option
    return None


def _defaults(path: Path) -> list[Any]:
    return list(yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", []))
