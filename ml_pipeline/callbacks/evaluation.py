"""PeriodicEvaluation: plays greedy episodes with their own seeds during training."""

from __future__ import annotations

from ml_pipeline.analysis.evaluate import Evaluation, evaluate_batch
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import integer_steps
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import info_means
from ml_pipeline.envs.evaluation import (
    MAX_EPISODE_STEPS,
    make_evaluation_envs,
    make_evaluation_workers,
)
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import HasWorkers, ParallelEnv, SerialEnv, WorkerError
from ml_pipeline.errors import first_line
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunningLoop

_FIRST_LIMIT = 1_000  # steps of an evaluated episode before a training episode has ended


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
        self.n_episodes = integer_steps("n_episodes", n_episodes)
        self._make_env = make_env
        self._settings = vec_env
        self._seed = stream_seed(seed, "evaluation")
        self._is_pending = False
        self._has_warned = False
        self._envs: SerialEnv | ParallelEnv | None = None  # kept, because workers start slowly

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        self._is_pending |= self.is_due(loop)
        if not self._is_pending:
            return
        result = self._evaluate(loop, has_ended=MEAN_RETURN in metrics)
        self._is_pending = False
        if result is None:
            return
        metrics[EVAL_RETURN] = result.mean
        metrics["eval/episode_return_std"] = result.std
        metrics["eval/episode_length"] = result.mean_length
        metrics["eval/n_cut_episodes"] = result.n_cut
        for name, mean in info_means(result.episodes).items():
            metrics[f"eval/info/{name}"] = mean

    def _evaluate(self, loop: RunningLoop, *, has_ended: bool) -> Evaluation | None:
        """None if its workers died twice and the run continues after such deaths."""
        try:
            return self._played(loop, has_ended=has_ended)
        except WorkerError as error:
            self.close()
            was_lost = error.__cause__ is None  # else the env itself raised
            if not was_lost or self._settings.on_worker_death != "restart":
                raise WorkerError(f"evaluation: {error}") from error
            say(f"evaluation: {first_line(error)}; starting its workers again")
        try:
            return self._played(loop, has_ended=has_ended)
        except WorkerError as error:
            self.close()
            say(f"evaluation at env step {loop.env_steps:,} left out: {first_line(error)}")
            return None

    def _played(self, loop: RunningLoop, *, has_ended: bool) -> Evaluation:
        n_envs = min(self.n_episodes, sum(env.num_envs for env in loop.envs))
        if self._envs is not None and self._envs.num_envs != n_envs:
            self.close()
        if self._envs is None:
            in_workers = isinstance(loop.envs[0].unwrapped, HasWorkers)
            make = make_evaluation_workers if in_workers else make_evaluation_envs
            self._envs = make(self._make_env, self._settings, n_envs=n_envs)
        own_limit = _time_limit(self._envs)
        limit = MAX_EPISODE_STEPS if has_ended or own_limit else _FIRST_LIMIT
        limit = max(limit, own_limit)
        result = evaluate_batch(
            loop.agent.for_playing(),
            self._envs,
            n_episodes=self.n_episodes,
            seed=self._seed,
            deterministic=True,
            max_episode_steps=limit,
        )
        if result.n_cut and not self._has_warned:
            self._has_warned = True
            say(
                f"evaluation: {result.n_cut} of {self.n_episodes} episodes did not end and were "
                f"cut at {limit:,} steps; if the env never ends an episode, give it a time limit: "
                "+env.wrappers.limit._target_=gymnasium.wrappers.TimeLimit "
                "+env.wrappers.limit.max_episode_steps=1000"
            )
        return result

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None

    def state_dict(self) -> StateDict:
        return {"is_due": self._is_pending}  # a resumed run repeats an interrupted evaluation

    def load_state_dict(self, state: StateDict) -> None:
        self._is_pending = state["is_due"]


def _time_limit(envs: SerialEnv | ParallelEnv) -> int:
    """The most steps of an episode; 0 if the env does not say."""
    return (envs.spec is not None and envs.spec.max_episode_steps) or 0
