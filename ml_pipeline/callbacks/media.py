"""What loggers show beyond numbers: histograms, videos, and the checkpoint at the end."""

from __future__ import annotations

from collections.abc import Mapping

from ml_pipeline.analysis.video import record_video
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.protocols import Callback, Trainer
from ml_pipeline.runs.checkpoint import best_or_latest, checkpoint_path
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import stream_seed


class Media(Callback):
    """Every ``every_steps`` the histograms of a rollout; at the end the best checkpoint.

    Told to the loggers that can show them: W&B and TensorBoard. Where there are none, this costs
    nothing.
    """

    def __init__(self, run: RunFolder, every_steps: float = 20_000) -> None:
        self.run = run
        self._every = EverySteps("every_steps", every_steps)

    def on_train_start(self, trainer: Trainer) -> None:
        self._every.begin(trainer)

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if not self._every.is_due(trainer):
            return
        for logger in trainer.loggers:
            if hasattr(logger, "log_histograms"):
                logger.log_histograms(trainer.last_rollout(), env_steps=trainer.env_steps)

    def on_train_end(self, trainer: Trainer) -> None:
        path = checkpoint_path(self.run, best_or_latest(self.run))
        for logger in trainer.loggers:
            if hasattr(logger, "log_file") and path.is_file():
                logger.log_file(path, kind="checkpoint", env_steps=trainer.env_steps)


class PolicyVideo(Callback):
    """Every ``every_steps``, and at the end, a greedy episode in the run's folder videos/."""

    def __init__(
        self, run: RunFolder, make_env: EnvFactory, seed: int, every_steps: float = 50_000
    ) -> None:
        self.run = run
        self._every = EverySteps("every_steps", every_steps)
        self._make_env = make_env.rendering("rgb_array")
        self._seed = stream_seed(seed, "video")

    def on_train_start(self, trainer: Trainer) -> None:
        self._every.begin(trainer)

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if not self._every.is_due(trainer):
            return
        _, paths = record_video(
            trainer.agent.for_playing(),
            self._make_env,
            self.run.videos,
            f"step-{trainer.env_steps}",
            n_episodes=1,
            seed=self._seed,
            deterministic=True,
        )
        for logger in trainer.loggers:
            for path in paths:
                if hasattr(logger, "log_file"):
                    logger.log_file(path, kind="video", env_steps=trainer.env_steps)
