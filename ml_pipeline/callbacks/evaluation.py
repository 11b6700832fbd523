"""PeriodicEvaluation: how good the policy is without exploration, on seeds of its own."""

from __future__ import annotations

from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import integer_steps
from ml_pipeline.envs.factory import EnvFactory, close_env
from ml_pipeline.protocols import Callback, Metrics, StateDict, Trainer
from ml_pipeline.seeding import stream_seed


class PeriodicEvaluation(Callback):
    """Every ``eval_every_steps`` env steps, and at the end, plays ``n_episodes`` greedy episodes.

    The episodes are the same ones each time, and so is the env: a new one, so that what its
    wrappers learned in the one before does not count. Two evaluations differ by the policy alone.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        seed: int,
        eval_every_steps: float = 10_000,
        n_episodes: int = 10,
    ) -> None:
        self._every = EverySteps("eval_every_steps", eval_every_steps)
        self.n_episodes = integer_steps("n_episodes", n_episodes)
        self._make_env = make_env
        self._seed = stream_seed(seed, "evaluation")
        self._is_due = False

    def on_train_start(self, trainer: Trainer) -> None:
        self._every.begin(trainer)

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self._is_due |= self._every.is_due(trainer)
        if not self._is_due:
            return
        env = self._make_env()
        try:
            result = evaluate(
                trainer.agent.for_playing(),
                env,
                n_episodes=self.n_episodes,
                seed=self._seed,
                deterministic=True,
            )
        finally:
            close_env(env)
        self._is_due = False
        metrics["eval/episode_return"] = result.mean
        metrics["eval/episode_return_std"] = result.std
        metrics["eval/episode_length"] = result.mean_length
        metrics["eval/n_cut_episodes"] = result.n_cut

    def state_dict(self) -> StateDict:
        return {"is_due": self._is_due}  # one that a stop signal cut short is made up for

    def load_state_dict(self, state: StateDict) -> None:
        self._is_due = state["is_due"]
