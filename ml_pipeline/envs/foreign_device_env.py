"""ForeignDeviceEnv: a vector env of another library whose tensors are on the agent's device.

Observations, rewards and flags go into the rollout there, without a copy to the host. Workers must
not import this module: it imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.envs.kinds import AnyEnv, Info
from ml_pipeline.envs.tensor_env import (
    MASK_KEY,
    DeviceVectorEnv,
    Position,
    StepResult,
    infos_of,
)
from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict


def why_on_host(env: ForeignVectorEnv, device: torch.device, infos: Info) -> str | None:
    """Why the observations of ``env`` go through host memory; None: not.

    ``infos``: those of its last reset.
    """
    if env.tensor_device is None:
        return "they are arrays"
    if env.tensor_device.type != device.type:
        return f"they are on {env.tensor_device}, the agent on {device}"
    if not isinstance(env.single_observation_space, (spaces.Box, spaces.Discrete)):
        return "they have several parts"
    if MASK_KEY in infos and not _is_batch(infos[MASK_KEY]):
        return "action masks are not one array"
    if env.has_reset_rows:
        return "some steps only reset an env; use AutoresetMode.SAME_STEP"
    return None


class ForeignDeviceEnv(DeviceVectorEnv):
    """``env`` returns tensors on ``device``. The library's own state cannot be saved."""

    why_no_graph = "another library steps them"

    def __init__(self, env: ForeignVectorEnv, *, device: torch.device | str) -> None:
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        super().__init__(env.num_envs, device=device, seed=0)
        self._env = env
        self.spec, self.render_mode = env.spec, env.render_mode
        self.position = self._start()

    def _start(self) -> Position:
        zeros = torch.zeros_like(self.seeds)
        return Position((), zeros, torch.zeros(self.num_envs, device=self.device), zeros + 1)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Tensor, Info]:
        obs, infos = self._env.reset_tensors(seed=seed, options=options)
        self.position = self._start()
        self._needs_reset = False
        mask = self._mask_in(infos)
        return self._there(obs), {} if mask is None else {MASK_KEY: mask}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Info]:
        self._check_call(actions)
        self.position, result = self.transition(self.position, actions)
        return result.obs, result.reward, result.terminated, result.truncated, infos_of(result)

    def transition(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step; not a pure function, because the library keeps the state of its envs."""
        obs, reward, terminated, truncated, infos = self._env.step_tensors(action)
        obs, reward = self._there(obs), self._there(reward).to(torch.float32)
        terminated, truncated = self._there(terminated).bool(), self._there(truncated).bool()
        done, final_obs = terminated | truncated, obs
        mask = self._mask_in(infos)
        last_infos = infos if self._env.is_reset_by_us else infos.get("final_info", {})
        final_mask = self._mask_in(last_infos)
        if mask is not None and final_mask is None:
            final_mask = torch.ones_like(mask)
        if bool(done.any()):
            if self._env.is_reset_by_us:
                final_obs = obs.clone()  # the env may use its tensors again
                obs, new_mask = self._restarted(final_obs, done)
                if mask is not None and new_mask is not None:
                    mask = torch.where(done[:, None], new_mask, mask)
            elif "final_obs" in infos:
                final_obs = self._with_finals(obs, infos["final_obs"], done)
            elif bool((truncated & ~terminated).any()):
                raise UserError(
                    f"{self._env.name}: an env was truncated, but infos have no final_obs, which "
                    "autoreset_mode=SAME_STEP requires"
                )
        n_steps = position.n_steps + 1
        total = position.episode_return + reward
        after = Position(
            (),
            n_steps.masked_fill(done, 0),
            total.masked_fill(done, 0.0),
            position.n_episodes + done,
        )
        ends = reward, terminated, truncated, final_obs, total, n_steps
        return after, StepResult(obs, *ends, mask, final_mask)

    def _restarted(self, before: Tensor, done: Tensor) -> tuple[Tensor, Tensor | None]:
        """Observations and action masks after a reset of the envs that have ended."""
        mask = done.cpu().numpy()
        given, infos = self._env.reset_tensors(options={"reset_mask": mask})
        obs = self._there(given)
        if not torch.equal(obs[~done], before[~done]):
            raise UserError(
                f"{self._env.name}: reset(options={{'reset_mask': mask}}) changed an env that had "
                "not ended; make it reset only the envs of the mask"
            )
        return obs, self._mask_in(infos)

    def _with_finals(self, obs: Tensor, given: Any, done: Tensor) -> Tensor:
        """The observations of this step before the reset; ``given`` is a batch or one per env."""
        final_obs = obs.clone()
        if isinstance(given, np.ndarray) and given.dtype == object:
            for env in done.nonzero().flatten().tolist():
                final_obs[env] = torch.as_tensor(given[env], device=self.device)
        else:
            final_obs[done] = self._there(given)[done]
        return final_obs

    def _mask_in(self, infos: Info) -> Tensor | None:
        given = infos.get(MASK_KEY)
        return self._there(given).bool() if _is_batch(given) else None

    def _there(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device=self.device)

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, saved: StateDict) -> None:
        raise TypeError("the envs of another library cannot be restored")

    @classmethod
    def single_env(cls, **kwargs: Any) -> AnyEnv:
        raise TypeError("make one env by its EnvFactory")

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close(**kwargs)


def _is_batch(given: object) -> bool:
    """Whether it is one array or tensor, with a row per env."""
    return isinstance(given, Tensor) or (
        isinstance(given, np.ndarray) and given.dtype.kind in "biuf"
    )
