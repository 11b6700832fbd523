"""Writes docs/config.md from the dataclasses of the config and the remarks in conf/.

python docs/config_reference.py > docs/config.md     (a test keeps the two in step)
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from ml_pipeline.config.train import EnvConfig, PPOConfig, TrainConfig, VecEnvConfig

CONF = Path(__file__).resolve().parents[1] / "conf"

HEAD = """# Config reference

Every key, its type, default and remark; made by `python docs/config_reference.py` from
`ml_pipeline/config.py` and `conf/`. On the command line: `key=value`, `group=option`,
`+key=value` for a key that is not there yet, `~key` to take one away.
`python train_ppo.py --cfg job` shows the config that a command makes, and trains nothing. A wrong
key, type or range is refused with its full name before anything starts.
"""

GROUPS = (
    ("", TrainConfig, "train.yaml", "The run"),
    ("env.", EnvConfig, "env/cartpole.yaml", "The env"),
    ("agent.", PPOConfig, "agent/ppo.yaml", "PPO"),
    ("vec_env.", VecEnvConfig, "vec_env/auto.yaml", "How the envs run"),
)

CHOICES = ("env", "network", "vec_env", "logger", "callbacks", "experiment", "sweep")


def remarks(path: Path) -> dict[str, str]:
    """The comments behind the keys of a YAML file."""
    found = re.findall(r"^(\w+):[^#\n]*#\s*(.+)$", path.read_text(), flags=re.MULTILINE)
    return dict(found)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def section(prefix: str, kind: type[Any], file: str, title: str) -> str:
    told = remarks(CONF / file)
    lines = [f"\n## {title}\n", "| key | type | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is not dict:
            continue  # a group of its own
        default = "{}" if field.default is dataclasses.MISSING else shown(field.default)
        type_name = re.sub(r"Optional\[(.+)\]", r"\1 or null", str(field.type))
        type_name = {"Any": "int or auto"}.get(type_name, type_name)
        remark = told.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {type_name} | {default} | {remark} |")
    return "\n".join(lines)


def choices() -> str:
    lines = ["\n## What can be chosen by name\n", "| group | options |", "|---|---|"]
    for group in CHOICES:
        options = ", ".join(f"`{path.stem}`" for path in sorted((CONF / group).glob("*.yaml")))
        lines.append(f"| `{group}=` | {options} |")
    return "\n".join(lines)


def page() -> str:
    return "\n".join([HEAD.rstrip(), *(section(*group) for group in GROUPS), choices()])


if __name__ == "__main__":
    print(page())
