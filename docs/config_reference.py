"""Writes docs/config.md from the config dataclasses and the comments in conf/.

python docs/config_reference.py > docs/config.md     (a test checks that the page is up to date)
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.config.train import EnvConfig, EvalEnvConfig, TrainConfig, VecEnvConfig

CONF = Path(__file__).resolve().parents[1] / "conf"

HEAD = """# Config reference

Every key with its type, default and comment. `python docs/config_reference.py` generates this
page from `ml_pipeline/config/` and `conf/`. On the command line, use:

| syntax | effect |
|---|---|
| `key=value` | sets a key |
| `group=option` | selects a file in `conf/` |
| `+key=value` | adds a new key |
| `~key` | removes a key |

`python train_ppo.py --cfg job` prints the config of a command without training. If a key, type
or range is wrong, an error names the key before the run starts.
"""

GROUPS = (
    ("", TrainConfig, "train.yaml", "The run"),
    ("env.", EnvConfig, "env/cartpole.yaml", "The env"),
    ("eval_env.", EvalEnvConfig, "env/cartpole.yaml", "What differs in the env of evaluations"),
    ("agent.", PPOConfig, "agent/ppo.yaml", "PPO"),
    ("vec_env.", VecEnvConfig, "vec_env/auto.yaml", "How the envs run"),
)

CHOICES = ("env", "network", "vec_env", "logger", "callbacks", "experiment", "sweep")


def comments(path: Path) -> dict[str, str]:
    """The trailing comment of each key in a YAML file."""
    found = re.findall(r"^(\w+):[^#\n]*#\s*(.+)$", path.read_text(), flags=re.MULTILINE)
    return dict(found)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def section(prefix: str, kind: type[Any], file: str, title: str) -> str:
    comment_of = comments(CONF / file)
    lines = [f"\n## {title}\n", "| key | type | default | comment |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        if dataclasses.is_dataclass(default) or default is dataclasses.MISSING:
            continue  # a config group, shown in its own section
        if field.name == "agent":
            continue  # likewise
        if isinstance(default, dict) and "_target_" in default:
            default = default["_target_"]
        type_name = re.sub(r"Optional\[(.+)\]", r"\1 or null", str(field.type))
        type_name = {"Any": "int or auto"}.get(type_name, type_name)
        comment = comment_of.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {type_name} | {shown(default)} | {comment} |")
    return "\n".join(lines)


def choices() -> str:
    lines = ["\n## Options by name\n", "| group | options |", "|---|---|"]
    for group in CHOICES:
        options = ", ".join(f"`{path.stem}`" for path in sorted((CONF / group).glob("*.yaml")))
        lines.append(f"| `{group}=` | {options} |")
    return "\n".join(lines)


def page() -> str:
    return "\n".join([HEAD.rstrip(), *(section(*group) for group in GROUPS), choices()])


if __name__ == "__main__":
    print(page())
