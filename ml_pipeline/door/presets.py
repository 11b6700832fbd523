"""check_presets: an experiment for another agent is refused by name, before Hydra sees its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from ml_pipeline.door.compose import CONF, ConfigError

DEFAULT_AGENT = "ppo"  # of conf/train.yaml


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
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    agent = DEFAULT_AGENT
    for entry in content.get("defaults", []):
        if isinstance(entry, str):
            agent = _agent_of(entry) or agent
        else:
            agent = entry.get("override /agent", agent)
    return agent
