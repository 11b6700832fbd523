"""Writes docs/config.md from the config dataclasses and the classes in conf/, with their comments.

python docs/config_reference.py > docs/config.md     (a test checks that the page is up to date)
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.pqn.agent import PQNConfig
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.td3.agent import TD3Config
from ml_pipeline.config.curriculum import PhaseConfig, UntilConfig
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.config.train import EnvConfig, EvalEnvConfig, TrainConfig, VecEnvConfig
from ml_pipeline.policy.image_networks import CNN
from ml_pipeline.shelves import preset_files
from ml_pipeline.targets import import_dotted
from ml_pipeline.training.contracts import Callback
from ml_pipeline.worlds.trading.config import FilesConfig, SyntheticConfig

HEAD = """# Config reference

Every key with its type, default and comment, every [hook](#hooks) of a callback and every
[metric](#metrics). `python docs/config_reference.py` generates this page from the dataclasses in
`ml_pipeline/config/` and `algorithms/*/config.py`, and from `conf/`. The keys of `env.kwargs` are
those of each env; the files in [worlds/](../ml_pipeline/worlds) explain them for trading, hockey
and Game Boy. On the command line, use:

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
    ("", TrainConfig, "The run"),
    ("env.", EnvConfig, "The env"),
    ("eval_env.", EvalEnvConfig, "What differs in the env of evaluations"),
    ("agent.", PPOConfig, "PPO"),
    ("agent.", DQNConfig, "DQN"),
    ("agent.", SACConfig, "SAC"),
    ("agent.", TD3Config, "TD3"),
    ("agent.", PQNConfig, "PQN"),
    ("vec_env.", VecEnvConfig, "How the envs run"),
    ("opponent.", OpponentConfig, "Self-play"),
    ("env.kwargs.data.", SyntheticConfig, "Synthetic markets"),
    ("env.kwargs.data.", FilesConfig, "Market files"),
    ("curriculum.phases.NAME.", PhaseConfig, "A phase of a curriculum"),
    ("curriculum.phases.NAME.until.", UntilConfig, "When a phase ends"),
)

# Parameters that the run passes; they are not keys.
PASSED = (
    *("observation_space", "run", "make_env", "vec_env", "seed", "device", "best_metric"),
    "load_policy",
    *("run_config", "sweep", "env_steps"),
)

EACH, EVALUATION = "each iteration", "after an evaluation"
# Name, meaning, and when it is logged.
METRICS = (
    ("env_steps", "env steps so far, over all envs: the x-axis", EACH),
    ("iteration", "iterations so far", EACH),
    ("n_envs", "number of envs", EACH),
    ("n_completed_episodes", "episodes that ended in this iteration", EACH),
    ("rollout/episode_return", "mean return of these episodes", "if an episode ended"),
    ("rollout/episode_length", "mean length of these episodes", "if an episode ended"),
    (
        "rollout/episode_return_mean_100",
        "mean return of the last 100 episodes",
        "after the first episode",
    ),
    (
        "rollout/episode_length_mean_100",
        "mean length of the last 100 episodes",
        "after the first episode",
    ),
    ("rollout/total_episodes", "episodes so far", EACH),
    (
        "rollout/info/NAME",
        "mean over the last 100 episodes of a number or bool in the info of the last step, such as "
        "`is_success`; at most 20 names",
        "if the env reports it; not for tensor envs",
    ),
    ("loss/policy", "policy loss, mean over the gradient steps; not for DQN", EACH),
    ("loss/value", "value loss, before `value_coef`, mean over the gradient steps", EACH),
    ("loss/grad_norm", "norm of the gradient before clipping, mean", EACH),
    (
        "loss/skipped_updates",
        "gradient steps that were skipped, because a value was not finite",
        "if any; needs `agent.on_nonfinite=skip`",
    ),
    ("policy/entropy", "entropy of the policy, mean", EACH),
    ("policy/approx_kl", "estimated KL divergence from the policy of the rollout, mean", EACH),
    ("policy/clip_fraction", "share of samples whose ratio was outside `clip_range`", EACH),
    ("policy/learning_rate", "learning rate of this iteration", EACH),
    ("policy/epsilon", "share of random actions", "DQN"),
    ("policy/temperature", "weight of the entropy", "SAC, after the first update"),
    ("policy/n_epochs", "epochs that ran; fewer than `n_epochs` after `max_kl`", EACH),
    (
        "value/explained_variance",
        "1 - variance of the value error / variance of the returns; 1 is perfect",
        EACH,
    ),
    ("value/mean", "mean value of the actions in the minibatches", "DQN and SAC"),
    ("replay/size", "transitions in the replay buffer", "DQN and SAC"),
    ("curriculum/phase", "number of the phase, from 1", "with a curriculum"),
    ("eval/episode_return", "mean return of the greedy episodes", EVALUATION),
    ("eval/episode_return_std", "their standard deviation", EVALUATION),
    ("eval/episode_length", "their mean length", EVALUATION),
    (
        "eval/info/NAME",
        "mean of a number or bool in the info of the last step, as `rollout/info/NAME`",
        EVALUATION,
    ),
    ("eval/n_cut_episodes", "episodes that did not end and were cut", EVALUATION),
    ("time/env_steps_per_second", "env steps of this iteration per second", EACH),
    ("time/iteration_seconds", "duration of the iteration, without callbacks and logging", EACH),
    ("time/collect_seconds", "the part of it that acts and waits for the envs", EACH),
    ("time/updates_per_env_step", "gradient steps per env step, as measured", "DQN and SAC"),
    ("time/updates_per_second", "gradient steps per second", "DQN and SAC"),
    ("workers/busy", "share of the collection that workers spend in their envs", "with workers"),
    ("workers/rss_mb", "resident memory of the largest worker", "with workers"),
    (
        "workers/restarts",
        "workers that were lost and replaced since the start or the last resume",
        "with workers",
    ),
    ("gpu/memory_mb", "GPU memory that torch has reserved", "on a GPU, once a second"),
    (
        "gpu/utilization",
        "share of the last second in which the GPU was busy",
        "on a GPU, once a second; needs the extra `gpu`",
    ),
    ("rollout/actions", "histogram of the actions", "W&B and TensorBoard, `callbacks.media`"),
    ("opponents/pool_size", "past selves in the pool", "each iteration, `opponent=self_play`"),
    ("opponents/games", "games since a copy of the agent last joined", "after the first game"),
    ("opponents/win_rate", "share of these games that the agent won", "after the first game"),
    ("opponents/draw_rate", "share of these games that were drawn", "after the first game"),
    ("opponents/loss_rate", "share of these games that the agent lost", "after the first game"),
    (
        "opponents/<name>_win_rate",
        "the same for a scripted player, recent games",
        "if it has played",
    ),
    ("opponents/rating", "the agent's Elo rating over all games of the run", "after 50 games"),
    ("rollout/advantages", "histogram of the advantages", "W&B and TensorBoard, `callbacks.media`"),
)

CHOICES = (
    *("agent", "env", "network", "vec_env", "logger", "callbacks", "opponent", "curriculum"),
    *("data", "experiment", "sweep"),
)


def comments(path: Path) -> dict[str, str]:
    """The trailing comment of each key in a YAML file; nested keys are dotted."""
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in path.read_text().splitlines():
        match = re.match(r"( *)(\w+):([^#]*)(?:#\s*(.+))?$", line)
        if match is not None:
            indent, name, _, comment = match.groups()
            parents = [*parents[: len(indent) // 2], name]
            if comment:
                found[".".join(parents)] = comment
    return found


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def field_comments(kind: type[Any]) -> dict[str, str]:
    """The comment above or behind each field; a field without one has that of the base class."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        lines = inspect.getsource(each).splitlines()
        names = vars(each).get("__annotations__", {})
        above: list[str] = []
        for line in lines:
            match = re.match(r"    (\w+): [^#]*(?:#\s*(.+))?$", line)
            if match is not None and match[1] in names:
                text = " ".join(above)
                comment = match[2] or text[:1].lower() + text[1:]
                if comment:
                    found[match[1]] = comment
            above = [*above, line.strip("# ")] if line.startswith("    # ") else []
    return found


def section(prefix: str, kind: type[Any], title: str) -> str:
    comment_of = field_comments(kind)
    lines = [f"\n## {title}\n", "| key | type | default | comment |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        if dataclasses.is_dataclass(default) or default is dataclasses.MISSING:
            continue  # a config group, shown in its own section
        if field.name in ("agent", "opponent", "curriculum"):
            continue  # likewise
        if isinstance(default, dict) and "_target_" in default:
            default = default["_target_"]
        type_name = re.sub(r"Optional\[(.+)\]", r"\1 or null", str(field.type))
        type_name = {"Any": "int or auto"}.get(type_name, type_name)
        type_name = type_name.replace("Union[float, str]", "float or str")
        comment = comment_of.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {type_name} | {shown(default)} | {comment} |")
    return "\n".join(lines)


def parts(group: str, title: str, *, named: bool) -> str:
    """The keys of the classes in conf/<group>/; ``named``: a file holds several, each with a name.

    A file that adds to default.yaml repeats none of its keys.
    """
    lines = [f"\n## {title}"]
    for path in sorted(preset_files(group).values()):
        content = yaml.safe_load(path.read_text()) or {}
        content.pop("defaults", None)
        entries = content if named else {"": content}
        for name, entry in entries.items():
            if entry.get("_target_", "???") == "???":
                continue  # network=own, whose class the user names
            target = import_dotted(entry["_target_"], key=group)
            place = f"{group}.{name}" if named else group
            prefix = f"{name}." if named else ""
            notes = {key.removeprefix(prefix): text for key, text in comments(path).items()}
            about = str(inspect.getdoc(target)).splitlines()[0]
            lines.append(f"\n### `{group}={path.stem}`: {target.__name__}\n\n{about}\n")
            lines += ["| key | type | default | comment |", "|---|---|---|---|"]
            rows = part_rows(place, target, entry, notes)
            lines += rows or [f"| `{place}` | | | no keys |"]
    return "\n".join(lines)


def part_rows(
    prefix: str, target: Any, entry: dict[str, Any], notes: dict[str, str], inner: str = ""
) -> list[str]:
    """One row per parameter; the default is that of the file, if it has the key."""
    rows: list[str] = []
    for name, parameter in inspect.signature(target).parameters.items():
        if name in PASSED or "Callable" in str(parameter.annotation):
            continue
        value, key = entry.get(name, parameter.default), f"{inner}{name}"
        if isinstance(value, dict):
            nested = import_dotted(value["_target_"], key=key) if "_target_" in value else CNN
            rows.append(row(f"{prefix}.{name}", parameter.annotation, "below", notes.get(key)))
            rows += part_rows(f"{prefix}.{name}", nested, value, notes, f"{key}.")
        else:
            rows.append(row(f"{prefix}.{name}", parameter.annotation, value, notes.get(key)))
    return rows


def row(key: str, annotation: Any, default: Any, comment: str | None) -> str:
    kind = str(annotation).replace(" | None", " or null").replace("|", "\\|")
    kind = kind.replace("Sequence[", "list[").replace("Mapping[", "dict[")
    about = (comment or "").replace("|", "\\|")
    return f"| `{key}` | {kind} | {shown(default)} | {about} |"


def metrics() -> str:
    lines = ["\n## Metrics\n", "The columns of `metrics.csv`, and the curves of every logger."]
    lines += ["", "| metric | meaning | when |", "|---|---|---|"]
    lines += [f"| `{name}` | {meaning} | {when} |" for name, meaning, when in METRICS]
    return "\n".join(lines)


def choices() -> str:
    lines = ["\n## Options by name\n", "| group | options |", "|---|---|"]
    for group in CHOICES:
        options = ", ".join(f"`{name}`" for name in sorted(preset_files(group)))
        lines.append(f"| `{group}=` | {options} |")
    return "\n".join(lines)


def hooks() -> str:
    """The methods of a callback, in the order in which a run calls them."""
    lines = ["\n## Hooks\n", "A callback overrides the methods that it needs."]
    lines += ["", "| hook | when it is called |", "|---|---|"]
    for name, method in vars(Callback).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments = ", ".join(list(inspect.signature(method).parameters)[1:])
            lines.append(f"| `{name}({arguments})` | {inspect.getdoc(method)} |")
    return "\n".join(lines)


def page() -> str:
    keys = [section(*group) for group in GROUPS]
    more = [
        parts("network", "Networks", named=False),
        parts("callbacks", "Callbacks", named=True),
        parts("logger", "Loggers", named=True),
    ]
    return "\n".join([HEAD.rstrip(), *keys, *more, choices(), hooks(), metrics()])


if __name__ == "__main__":
    print(page())
