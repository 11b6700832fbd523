"""PeriodicEvaluation: plays greedy episodes with their own seeds during training."""

from __future__ import annotations

from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import integer_steps
from ml_pipeline.envs.factory import EnvFactory, close_env
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.protocols import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.loop import Loop


class PeriodicEvaluation(EverySteps):
    """Every ``eval_every_steps`` env steps, and at the end, plays ``n_episodes`` greedy episodes.

    Every evaluation uses the same seeds and a new env, so that no wrapper keeps its state.
    Two evaluations differ only by the policy.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        seed: int,
        eval_every_steps: float = 10_000,
        n_episodes: int = 10,
    ) -> None:
        super().__init__("eval_every_steps", eval_every_steps)
        self.n_episodes = integer_steps("n_episodes", n_episodes)
        self._make_env = make_env
        self._seed = stream_seed(seed, "evaluation")
        self._is_pending = False

    def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
        self._is_pending |= self.is_due(loop)
        if not self._is_pending:
            return
        env = self._make_env()
        try:
            result = evaluate(
                loop.agent.for_playing(),
                env,
                n_episodes=self.n_episodes,
                seed=self._seed,
                deterministic=True,
            )
        finally:
            close_env(env)
        self._is_pending = False
        metrics[EVAL_RETURN] = result.mean
        metrics["eval/episode_return_std"] = result.std
        metrics["eval/episode_length"] = result.mean_length
        metrics["eval/n_cut_episodes"] = result.n_cut

    def state_dict(self) -> StateDict:
        return {"is_due": self._is_pending}  # a resumed run repeats an interrupted evaluation

    def load_state_dict(self, state: StateDict) -> None:
        self._is_pending = state["is_due"]
