"""PeriodicEvaluation: plays greedy episodes with their own seeds during training."""

from __future__ import annotations

from ml_pipeline.analysis.evaluate import Evaluation, Evaluator
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import integer_steps
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import info_means
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import HasWorkers, WorkerError
from ml_pipeline.errors import first_line
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunningLoop


class PeriodicEvaluation(EverySteps):
    """Every ``eval_every_steps`` env steps, and at the end, plays ``n_episodes`` greedy episodes.

    Every evaluation uses the same seeds and new envs, so that no wrapper keeps its state. Two
    evaluations differ only by the policy. The envs are at most as many as those of the run, and
    they run in workers if those do.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        vec_env: VecEnvConfig,
        seed: int,
        eval_every_steps: float = 10_000,
        n_episodes: int = 10,
    ) -> None:
        super().__init__("eval_every_steps", eval_every_steps)
        self._evaluator = Evaluator(
            make_env,
            vec_env,
            n_episodes=integer_steps("n_episodes", n_episodes),
            seed=stream_seed(seed, "evaluation"),
        )
        self._survives_worker_death = vec_env.on_worker_death == "restart"
        self._is_pending = False
        self._has_warned = False

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        self._is_pending |= self.is_due(loop)
        if not self._is_pending:
            return
        result = self._evaluate(loop, episodes_end=MEAN_RETURN in metrics)
        self._is_pending = False
        if result is None:
            return
        self._warn_once(result)
        metrics[EVAL_RETURN] = result.mean
        metrics["eval/episode_return_std"] = result.std
        metrics["eval/episode_length"] = result.mean_length
        metrics["eval/n_cut_episodes"] = result.n_cut
        for name, mean in info_means(result.episodes).items():
            metrics[f"eval/info/{name}"] = mean

    def _evaluate(self, loop: RunningLoop, *, episodes_end: bool) -> Evaluation | None:
        """None if its workers died twice and the run continues after such deaths."""
        try:
            return self._played(loop, episodes_end=episodes_end)
        except WorkerError as error:
            self.close()
            was_lost = error.__cause__ is None  # else the env itself raised
            if not was_lost or not self._survives_worker_death:
                raise WorkerError(f"evaluation: {error}") from error
            say(f"evaluation: {first_line(error)}; starting its workers again")
        try:
            return self._played(loop, episodes_end=episodes_end)
        except WorkerError as error:
            self.close()
            say(f"evaluation at env step {loop.env_steps:,} left out: {first_line(error)}")
            return None

    def _played(self, loop: RunningLoop, *, episodes_end: bool) -> Evaluation:
        return self._evaluator.evaluate(
            loop.agent.for_playing(),
            most_envs=sum(env.num_envs for env in loop.envs),
            in_workers=isinstance(loop.envs[0].unwrapped, HasWorkers),
            episodes_end=episodes_end,
        )

    def _warn_once(self, result: Evaluation) -> None:
        if not result.n_cut or self._has_warned:
            return
        self._has_warned = True
        say(
            f"evaluation: {result.n_cut} of {len(result.episodes)} episodes did not end and were "
            f"cut at {result.max_episode_steps:,} steps; if the env never ends an episode, give it "
            "a time limit: +env.wrappers.limit._target_=gymnasium.wrappers.TimeLimit "
            "+env.wrappers.limit.max_episode_steps=1000"
        )

    def close(self) -> None:
        self._evaluator.close()

    def state_dict(self) -> StateDict:
        return {"is_due": self._is_pending}  # a resumed run repeats an interrupted evaluation

    def load_state_dict(self, state: StateDict) -> None:
        self._is_pending = state["is_due"]
