"""The public functions: ``train`` starts a run, ``load`` returns a trained policy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.analysis.listing import newest_run
from ml_pipeline.assembly import run
from ml_pipeline.assembly.build import first_leaf
from ml_pipeline.assembly.compose import with_config_dir
from ml_pipeline.assembly.load import load_policy
from ml_pipeline.assembly.run import RunResult
from ml_pipeline.config.train import RUN_ROOT
from ml_pipeline.envs.factory import close_env
from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.policy.observations import batched
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
    if str(path) == "latest" and not Path(path).exists():
        path = newest_run(Path(RUN_ROOT)).path
    policy, env, env_name = load_policy(path, trust=trust)
    close_env(env)
    return LoadedPolicy(policy, env_name, env.observation_space, env.action_space)


class LoadedPolicy:
    """Chooses actions: ``action = load(RUN).predict(obs)``."""

    def __init__(
        self,
        policy: Policy,
        env_name: str,
        observation_space: AnySpace,
        action_space: AnySpace,
    ) -> None:
        self.policy = policy
        self.env_name = env_name
        self.observation_space = observation_space
        self.action_space = action_space
        self._memory: Tensor | None = None
        self._n_envs = 0

    def predict(self, obs: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them.

        A recurrent policy remembers its episodes from call to call; ``reset`` starts new ones.
        """
        is_one = self._is_one(obs)
        if is_one:
            obs = batched(self.observation_space, [obs])
        if action_mask is not None:
            action_mask = np.asarray(action_mask, dtype=bool)
            action_mask = action_mask[np.newaxis] if is_one else action_mask
        _check_finite(obs)
        n_envs = len(first_leaf(obs))
        if n_envs != self._n_envs:
            self._memory, self._n_envs = self.policy.new_memory(n_envs), n_envs
        actions = self.policy.act_batch(
            obs, deterministic, action_mask=action_mask, memory=self._memory
        )
        return actions[0] if is_one else actions

    def reset(self) -> None:
        """Start new episodes; only a recurrent policy needs it."""
        self._n_envs = 0

    def _is_one(self, obs: Any) -> bool:
        space = self.observation_space
        while isinstance(space, (spaces.Dict, spaces.Tuple)):
            space = next(iter(space.values())) if isinstance(space, spaces.Dict) else space[0]
        found, shape = np.shape(first_leaf(obs)), space.shape or ()
        if found == shape:
            return True
        if found[1:] == shape and len(found) == len(shape) + 1:
            return False
        raise ValueError(
            f"obs has the shape {list(found)}; expected {list(shape)}, or [n, ...] for a batch"
        )


def _check_finite(obs: Any) -> None:
    """Runs do not learn from other observations, so actions for them would mean nothing."""
    if isinstance(obs, (dict, tuple)):
        for part in obs.values() if isinstance(obs, dict) else obs:
            _check_finite(part)
        return
    array = np.asarray(obs)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"obs has the value {array[~np.isfinite(array)][0]}; it must be finite")
