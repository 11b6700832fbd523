"""The public functions: ``train`` starts a run, ``load`` returns a trained policy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ml_pipeline.assembly import run
from ml_pipeline.assembly.compose import with_config_dir
from ml_pipeline.assembly.load import load_policy
from ml_pipeline.assembly.loaded_policy import LoadedPolicy
from ml_pipeline.assembly.run import RunResult
from ml_pipeline.envs.factory import close_env
from ml_pipeline.runs.console import quiet_console
from ml_pipeline.training.contracts import Callback


def train(
    *overrides: str | Sequence[str],
    callbacks: Mapping[str, Callback] | None = None,
    config_dir: Path | str | None = None,
    quiet: bool = False,
    **settings: object,
) -> RunResult:
    """Train as the command line does: ``train("env=acrobot", n_envs=16, agent={"gamma": 0.98})``.

    ``callbacks`` are called after those of the config. ``config_dir`` is a folder with your own
    YAML files, as for ``--config-dir``. ``quiet`` prints nothing.
    """
    words = [word for each in overrides for word in ([each] if isinstance(each, str) else each)]
    words += [*as_overrides(settings), *with_config_dir(config_dir)]
    with quiet_console(quiet):
        return run.train(words, callbacks=callbacks)


def as_overrides(settings: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Settings as Hydra overrides; a nested mapping sets the keys below its name."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{prefix}{name}.")
        else:
            add = "++" if prefix else ""  # env.kwargs and the like take new keys
            yield f"{add}{prefix}{name}={_hydra_value(value)}"


def _hydra_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_hydra_value(each) for each in value)}]"
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text)
    if is_plain and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def load(path: Path | str, *, trust: bool = False) -> LoadedPolicy:
    """The policy of a run folder, or of an exported .onnx or .pt2 file.

    ``latest`` is the run in ``runs`` that was started or resumed last.
    ``trust`` accepts files of another user that can run code (docs/runs.md).
    """
    policy, env, env_name = load_policy(path, trust=trust)
    close_env(env)
    return LoadedPolicy(policy, env_name, env.observation_space, env.action_space)
