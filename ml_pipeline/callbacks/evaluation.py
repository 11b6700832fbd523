"""PeriodicEvaluation: plays episodes with their own seeds during training."""

from __future__ import annotations

from ml_pipeline.analysis.evaluate import FEW, Evaluation, Evaluator
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import check, integer_steps
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import info_means
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import HasWorkers, WorkerError
from ml_pipeline.errors import first_line
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunningLoop


class PeriodicEvaluation(EverySteps):
    """Every ``eval_every_steps`` env steps, and at the end, plays ``n_episodes`` episodes.

    ``deterministic``: the policy acts greedily; false: it samples its actions, as in training.

    Every evaluation uses the same seeds and new envs, so that no wrapper keeps its state. Two
    evaluations differ only by the policy. The envs are at most as many as those of the run, and
    they run in workers if those do. If the env's class sets ``is_deterministic = True`` and the
    policy is greedy, all episodes would be equal, so one is played. If it does not, and all
    episodes were equal, see ``Evaluator``.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        vec_env: VecEnvConfig,
        seed: int,
        eval_every_steps: float = 10_000,
        n_episodes: int = 10,
        deterministic: bool = True,
    ) -> None:
        check(type(deterministic) is bool, "deterministic", "true | false", deterministic)
        super().__init__("eval_every_steps", eval_every_steps)
        self._make_env = make_env
        self._vec_env = vec_env
        self._seed = seed
        self._deterministic = deterministic
        n_episodes = integer_steps("n_episodes", n_episodes)
        # An EnvFactory; a test or a script may pass any function.
        self._is_one_enough = deterministic and getattr(make_env, "is_deterministic", False)
        self._is_reported = n_episodes == 1 or not self._is_one_enough
        n_episodes = 1 if self._is_one_enough else n_episodes
        self._evaluator = self._make_evaluator(n_episodes, "evaluation")
        self._final: Evaluator | None = None  # of other episodes
        self._survives_worker_death = vec_env.on_worker_death == "restart"
        self._is_pending = False
        self._has_warned = False

    def _make_evaluator(self, n_episodes: int, stream: str) -> Evaluator:
        seed = stream_seed(self._seed, stream)
        return Evaluator(
            self._make_env,
            self._vec_env,
            n_episodes=n_episodes,
            seed=seed,
            deterministic=self._deterministic,
        )

    def on_train_start(self, loop: RunningLoop) -> None:
        super().on_train_start(loop)
        if not self._is_reported:
            self._is_reported = True
            say("evaluation: plays one episode, because the env declares that it is deterministic")

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        self._is_pending |= self.is_due(loop)
        if not self._is_pending:
            return
        result = self._evaluate(loop, episodes_end=MEAN_RETURN in metrics)
        self._is_pending = False
        if result is None:
            return
        self._warn_once(result)
        metrics.update(_metrics(result))

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
        policy = loop.agent.for_playing()
        return self._in_envs(self._evaluator, policy, loop, episodes_end=episodes_end)

    def _in_envs(
        self, evaluator: Evaluator, policy: Policy, loop: RunningLoop, *, episodes_end: bool
    ) -> Evaluation:
        expected_equal = evaluator.expects_equal
        result = evaluator.evaluate(
            policy,
            most_envs=sum(env.num_envs for env in loop.envs),
            in_workers=isinstance(loop.envs[0].unwrapped, HasWorkers),
            episodes_end=episodes_end,
        )
        n_episodes = evaluator.n_episodes
        if n_episodes <= FEW:
            return result  # all are played each time
        if evaluator.expects_equal and not expected_equal:
            say(
                f"evaluation: its {n_episodes} episodes are equal step by step; from now on it "
                "plays two, and the others only if these differ"
            )
        elif expected_equal and not evaluator.expects_equal:
            say(f"evaluation: episodes differ now; plays all {n_episodes} again")
        return result

    def play_final(
        self, policy: Policy, loop: RunningLoop, *, n_episodes: int, episodes_end: bool
    ) -> Metrics:
        """The metrics of a policy in ``n_episodes`` that no evaluation of the run has played."""
        if self._final is None:
            self.close()  # its workers, before others start
            n_episodes = 1 if self._is_one_enough else n_episodes
            self._final = self._make_evaluator(n_episodes, "final evaluation")
            self._final.expects_equal = self._evaluator.expects_equal
        return _metrics(self._in_envs(self._final, policy, loop, episodes_end=episodes_end))

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
        if self._final is not None:
            self._final.close()

    def state_dict(self) -> StateDict:
        # A resumed run repeats an interrupted evaluation.
        return {"is_due": self._is_pending, "expects_equal": self._evaluator.expects_equal}

    def load_state_dict(self, state: StateDict) -> None:
        self._is_pending = state["is_due"]
        self._evaluator.expects_equal = state.get("expects_equal", False)  # older runs lack it


def _metrics(result: Evaluation) -> Metrics:
    means = {f"eval/info/{name}": mean for name, mean in info_means(result.episodes).items()}
    return {
        EVAL_RETURN: result.mean,
        "eval/episode_return_std": result.std,
        "eval/episode_length": result.mean_length,
        "eval/n_cut_episodes": result.n_cut,
        **means,
    }
