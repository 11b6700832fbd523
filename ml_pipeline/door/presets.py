"""check_presets: an experiment for another agent is refused by name, before Hydra sees its keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ml_pipeline.door.compose import CONF, ConfigError


def default_agent() -> str:
    """The option of agent= in conf/train.yaml."""
    groups = (each for each in _defaults(CONF / "train.yaml") if isinstance(each, dict))
    return next(str(each["agent"]) for each in groups if "agent" in each)


def check_presets(words: Sequence[str], agent: str) -> None:
    """Refuse ``experiment=NAME`` of ours if it trains another agent; a user's own are not read."""
    for word in words:
        key, _, names = word.partition("=")
        for name in names.split(",") if key == "experiment" else ():
            wanted = _agent_of(name)
            if wanted is not None and wanted != agent:
                raise ConfigError(
                    f"experiment={name}: trains agent={wanted}; use train_{wanted}.py"
                )


def _agent_of(name: str) -> str | None:
    """The agent of an experiment or of the one that it extends; None for an unknown name."""
    path = CONF / "experiment" / f"{name}.yaml"
    if not path.is_file():
        return None
    agent = default_agent()
    for entry in _defaults(path):
        if isinstance(entry, str):
            agent = _agent_of(entry) or agent
        else:
            agent = entry.get("override /agent", agent)
    return agent


def _defaults(path: Path) -> list[Any]:
    return list(yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", []))
