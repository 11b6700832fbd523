"""Media and PolicyVideo: histograms, the final checkpoint and videos for the loggers."""

from __future__ import annotations

from collections.abc import Mapping

from ml_pipeline.analysis.video import check_video, record_video
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.runs.checkpoint import best_or_latest, checkpoint_path
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunningLoop


class Media(EverySteps):
    """Logs histograms of a rollout every ``every_steps``, and the best checkpoint at the end.

    Only W&B and TensorBoard show them. Without such a logger this costs nothing.
    """

    def __init__(self, run: RunFolder, every_steps: float = 20_000) -> None:
        super().__init__("every_steps", every_steps)
        self.run = run

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        if not self.is_due(loop):
            return
        for logger in loop.loggers:
            if hasattr(logger, "log_histograms"):
                logger.log_histograms(loop.last_rollout(), env_steps=loop.env_steps)

    def on_train_end(self, loop: RunningLoop) -> None:
        path = checkpoint_path(self.run, best_or_latest(self.run))
        for logger in loop.loggers:
            if hasattr(logger, "log_file") and path.is_file():
                logger.log_file(path, kind="checkpoint", env_steps=loop.env_steps)


class PolicyVideo(EverySteps):
    """Records a greedy episode into RUN/videos every ``every_steps``, and at the end."""

    def __init__(
        self, run: RunFolder, make_env: EnvFactory, seed: int, every_steps: float = 50_000
    ) -> None:
        super().__init__("every_steps", every_steps)
        self.run = run
        self._make_env = make_env.rendering("rgb_array")
        check_video(self._make_env)
        self._seed = stream_seed(seed, "video")

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        if not self.is_due(loop):
            return
        _, paths = record_video(
            loop.agent.for_playing(),
            self._make_env,
            self.run.videos,
            f"step-{loop.env_steps}",
            n_episodes=1,
            seed=self._seed,
            deterministic=True,
        )
        for logger in loop.loggers:
            for path in paths:
                if hasattr(logger, "log_file"):
                    logger.log_file(path, kind="video", env_steps=loop.env_steps)
