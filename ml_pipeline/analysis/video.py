"""Videos of a policy: complete episodes as mp4, recorded by Gymnasium."""

from __future__ import annotations

import warnings
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np

from ml_pipeline.analysis.evaluate import Evaluation, evaluate
from ml_pipeline.envs.factory import EnvError, close_env, step_errors_named
from ml_pipeline.envs.kinds import AnyEnv, MakeEnv
from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra, missing_extra
from ml_pipeline.policy.contracts import Policy


def check_video(make_env: MakeEnv) -> None:
    """Render one frame, to find a missing package or render mode before training starts."""
    import_extra("moviepy", needed_by="a video")
    env = make_env()
    try:
        _check_render_mode(env)
        with step_errors_named():
            env.reset(seed=0)
            frame = env.render()
    except EnvError as error:
        if isinstance(error.__cause__, gym.error.DependencyNotInstalled):
            raise missing_extra("a video", error.__cause__) from error
        raise
    finally:
        close_env(env)
    if np.ndim(frame) != 3:  # type: ignore[arg-type]
        raise UserError(f"a video needs frames [height, width, 3], but the env rendered {frame!r}")


def _check_render_mode(env: AnyEnv) -> None:
    if env.render_mode != "rgb_array":
        raise UserError(
            f"render_mode={env.render_mode}: a video needs an env with render_mode=rgb_array"
        )


def record_video(
    policy: Policy,
    make_env: MakeEnv,
    folder: Path,
    name: str,
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
) -> tuple[Evaluation, list[Path]]:
    """Write ``<name>-episode-<k>.mp4`` per episode; the env must render to arrays."""
    import_extra("moviepy", needed_by="a video")
    env = make_env()
    _check_render_mode(env)
    before = {path: path.stat().st_mtime_ns for path in folder.glob(f"{name}-episode-*.mp4")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an existing folder and about the codec
            recorder = gym.wrappers.RecordVideo(
                env, str(folder), lambda episode: True, name_prefix=name, disable_logger=True
            )
            with closing(recorder):
                result = evaluate(
                    policy, recorder, n_episodes=n_episodes, seed=seed, deterministic=deterministic
                )
    except gym.error.DependencyNotInstalled as error:
        raise missing_extra("a video", error) from error
    written = sorted(folder.glob(f"{name}-episode-*.mp4"))
    return result, [path for path in written if before.get(path) != path.stat().st_mtime_ns]
