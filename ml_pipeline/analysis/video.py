"""Videos of a policy: complete episodes as mp4, recorded by Gymnasium."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym

from ml_pipeline.analysis.evaluate import Evaluation, evaluate
from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra, missing_extra
from ml_pipeline.protocols import Policy


def record_video(
    policy: Policy,
    make_env: Callable[[], gym.Env[Any, Any]],
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
    if env.render_mode != "rgb_array":
        raise UserError(
            f"render_mode={env.render_mode}: a video needs an env with render_mode=rgb_array"
        )
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
