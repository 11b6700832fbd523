"""Evaluation: plays complete episodes of a policy, each from a seed of its own.

``evaluate`` plays in one env, ``evaluate_batch`` in several at once, ``Evaluator`` keeps its envs
for the next time. Workers import this module: keep torch out of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import Episode, counts_episodes, row_numbers
from ml_pipeline.envs.kinds import AnyEnv, AnyVectorEnv, AnyWrapper, Info, MakeEnv
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.signals import raise_swallowed

# An env without a time limit may never end an episode. This is longer than any usual limit:
# Atari's is 27,000 steps of 4 frames.
MAX_EPISODE_STEPS = 30_000
_FIRST_LIMIT = 1_000  # the same, while no episode has ended anywhere

# Keys of the options of a reset that begins an evaluation, and of the info of an ended episode.
_STRIDE, _END, _MAX_STEPS, _EVALUATED = "stride", "end", "max_steps", "evaluated"
MOST_ENVS = 8  # to play in at the same time, once
FEW = 2  # episodes to play where all are expected to be equal


class Evaluation(NamedTuple):
    """Played episodes, in the order of their seeds, and their statistics."""

    episodes: list[Episode]
    n_cut: int  # episodes that reached max_episode_steps
    max_episode_steps: int
    are_equal: bool  # several episodes, with the same observations and rewards in every step

    @property
    def mean(self) -> float:
        return float(np.mean(self._returns()))

    @property
    def std(self) -> float:
        return float(np.std(self._returns()))

    @property
    def min(self) -> float:
        return float(np.min(self._returns()))

    @property
    def max(self) -> float:
        return float(np.max(self._returns()))

    @property
    def mean_length(self) -> float:
        return float(np.mean([episode.length for episode in self.episodes]))

    def _returns(self) -> list[float]:
        return [episode.episode_return for episode in self.episodes]


def evaluate(
    policy: Policy,
    env: AnyEnv,
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Evaluation:
    """Play ``n_episodes``; episode k starts from seed + k, so each can be replayed alone."""
    with closing(SerialEnv([partial(_EvaluationEnv, lambda: env, is_borrowed=True)])) as envs:
        return evaluate_batch(
            policy,
            envs,
            n_episodes=n_episodes,
            seed=seed,
            deterministic=deterministic,
            max_episode_steps=max_episode_steps,
        )


def make_evaluation_envs(
    make_env: MakeEnv, settings: VecEnvConfig, *, n_envs: int, in_workers: bool = False
) -> SerialEnv | ParallelEnv:
    """Envs for ``evaluate_batch``, in this process or in workers."""
    env_fns = [partial(_EvaluationEnv, make_env)] * n_envs
    if not in_workers:
        return SerialEnv(env_fns, infos=settings.infos)  # type: ignore[arg-type]  # VecEnvConfig
    return ParallelEnv(
        env_fns,
        infos=settings.infos,  # type: ignore[arg-type]  # checked by VecEnvConfig
        n_workers=settings.n_workers,
        start_method=settings.start_method,  # type: ignore[arg-type]  # as above
        step_timeout=settings.step_timeout_seconds,
    )


def evaluate_batch(
    policy: Policy,
    envs: AnyVectorEnv,
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Evaluation:
    """As ``evaluate``, in the envs of ``make_evaluation_envs``; env i of n plays i, i + n, ..."""
    n_envs = envs.num_envs
    options = {_STRIDE: n_envs, _END: seed + n_episodes, _MAX_STEPS: max_episode_steps}
    obs, infos = envs.reset(seed=seed, options=options)  # env i gets seed + i
    memory, first_memory = policy.new_memory(n_envs), policy.new_memory(n_envs)
    episodes: dict[int, Episode] = {}
    traces: set[int] = set()
    n_cut = 0
    while len(episodes) < n_episodes:
        mask = policy.mask_of(infos)
        action = policy.act_batch(obs, deterministic, action_mask=mask, memory=memory)
        obs, _, terminated, truncated, infos = envs.step(action)
        done = np.flatnonzero(terminated | truncated).tolist()
        if not done:
            continue
        if memory is not None and first_memory is not None:
            memory[done] = first_memory[done]
        for ended in _ended(infos.get("final_info", {}), done):
            if ended.seed < seed + n_episodes:  # else the number of envs exceeds that of episodes
                episodes[ended.seed] = ended.episode
                traces.add(ended.trace)
                n_cut += ended.is_cut
    in_order = [episodes[number] for number in sorted(episodes)]
    are_equal = n_episodes > 1 and len(traces) == 1
    return Evaluation(in_order, n_cut, max_episode_steps, are_equal)


def without_repeats(
    play: Callable[..., Evaluation],
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
    is_deterministic: bool,
) -> Evaluation:
    """``play(n_episodes=..., seed=...)``, without episodes that repeat the first ones.

    Of a greedy policy it plays one if the env declares ``is_deterministic``, and else stops after
    ``MOST_ENVS`` if these are equal. Fewer could be equal by chance. ``left_out`` says so.
    """
    n_first = min(n_episodes, 1 if is_deterministic else MOST_ENVS) if deterministic else n_episodes
    first = play(n_episodes=n_first, seed=seed)
    n_left = n_episodes - n_first
    if not n_left or is_deterministic or first.are_equal:
        return first
    rest = play(n_episodes=n_left, seed=seed + n_first)
    return rest._replace(
        episodes=first.episodes + rest.episodes, n_cut=first.n_cut + rest.n_cut, are_equal=False
    )


def left_out(result: Evaluation, n_episodes: int) -> str:
    """Why ``without_repeats`` played fewer than ``n_episodes``; an empty text if it did not."""
    n_played = len(result.episodes)
    if n_played == n_episodes:
        return ""
    if not result.are_equal:
        return "plays one episode, because the env declares that it is deterministic"
    return (
        f"{n_episodes - n_played} more episodes left out: the first {n_played} are equal step by "
        "step, whatever their seed"
    )


class _Ended(NamedTuple):
    seed: int
    episode: Episode
    is_cut: bool
    trace: int  # the same number for the same observations and rewards


def _ended(final_info: Mapping[str, Any], done: list[int]) -> list[_Ended]:
    """The episodes that ended in this step."""
    if _EVALUATED not in final_info:
        return []
    result, has_result = final_info[_EVALUATED], final_info[f"_{_EVALUATED}"]
    ended = []
    for i in done:
        if has_result[i]:
            gained, length = float(result["return"][i]), int(result["length"][i])
            episode = Episode(gained, length, 1, row_numbers(final_info, i))
            seed, trace = int(result["seed"][i]), int(result["trace"][i])
            ended.append(_Ended(seed, episode, bool(result["is_cut"][i]), trace))
    return ended


class Evaluator:
    """Plays the same episodes again and again, so that two results differ by the policy.

    It keeps its envs in between, because workers start slowly.

    If a greedy policy played equal episodes from all seeds, the env is deterministic. Then it plays
    two of them the next time, and all others only if these two differ.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        settings: VecEnvConfig,
        *,
        n_episodes: int,
        seed: int,
        deterministic: bool = True,
    ) -> None:
        self.n_episodes = n_episodes
        self._make_env = make_env
        self._settings = settings
        self._seed = seed
        self._deterministic = deterministic
        self._envs: SerialEnv | ParallelEnv | None = None
        self.expects_equal = False  # because the last episodes were

    def evaluate(
        self, policy: Policy, *, most_envs: int, in_workers: bool, episodes_end: bool
    ) -> Evaluation:
        """``episodes_end``: an episode of training has ended, so that these may take longer."""
        play = partial(
            self._play,
            policy,
            most_envs=most_envs,
            in_workers=in_workers,
            episodes_end=episodes_end,
        )
        if self.expects_equal and self.n_episodes > FEW:
            result = play(FEW)
            if result.are_equal:
                return result
        result = play(self.n_episodes)
        self.expects_equal = self._deterministic and result.are_equal
        return result

    def _play(
        self,
        policy: Policy,
        n_episodes: int,
        *,
        most_envs: int,
        in_workers: bool,
        episodes_end: bool,
    ) -> Evaluation:
        n_envs = min(n_episodes, most_envs)
        if self._envs is not None and self._envs.num_envs != n_envs:
            self.close()
        if self._envs is None:
            self._envs = make_evaluation_envs(
                self._make_env, self._settings, n_envs=n_envs, in_workers=in_workers
            )
        own_limit = (self._envs.spec is not None and self._envs.spec.max_episode_steps) or 0
        limit = MAX_EPISODE_STEPS if episodes_end or own_limit else _FIRST_LIMIT
        return evaluate_batch(
            policy,
            self._envs,
            n_episodes=n_episodes,
            seed=self._seed,
            deterministic=self._deterministic,
            max_episode_steps=max(limit, own_limit),
        )

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None


class _EvaluationEnv(AnyWrapper):
    """A reset with options plays the episodes of seeds ``range(seed, end, stride)``, then pauses.

    The last info of each episode has its seed, return, length, and whether it was cut. Every
    evaluation starts with a new env, so that no wrapper keeps its state. A paused env costs
    nothing while the others of its batch finish.
    """

    def __init__(self, make_env: MakeEnv, *, is_borrowed: bool = False) -> None:
        """``is_borrowed``: the env belongs to the caller, so it is neither renewed nor closed."""
        super().__init__(make_env())
        self._make_env = make_env
        self._is_borrowed = is_borrowed
        self._is_new = True
        self._counts_own_episodes = counts_episodes(self.env)
        self._seeds: list[int] = []  # of the episodes to play, the current one first
        self._idle: tuple[Any, Info] = (None, {})  # observation and info of a pause
        self._max_steps = MAX_EPISODE_STEPS
        self._return = 0.0
        self._length = 0
        self._lost_life = False
        self._trace = 0  # of the episode so far

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        if options is not None:
            return self._begin(int(seed or 0), options)
        if self._lost_life:
            self._lost_life = False
            return self.env.reset()
        del self._seeds[:1]
        return self._start_episode() if self._seeds else deepcopy(self._idle)

    def _begin(self, seed: int, options: dict[str, Any]) -> tuple[Any, Info]:
        if not (self._is_new or self._is_borrowed):
            self.env.close()
            self.env = self._make_env()
        self._is_new = self._lost_life = False
        self._seeds = list(range(seed, options[_END], options[_STRIDE])) or [seed]
        self._max_steps = options[_MAX_STEPS]
        obs, info = self._start_episode()
        self._idle = deepcopy((obs, info))
        return obs, info

    def _start_episode(self) -> tuple[Any, Info]:
        self._return = 0.0
        self._length = 0
        obs, info = self.env.reset(seed=self._seeds[0])
        self._trace = _crc(obs, 0)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        if not self._seeds:
            obs, info = deepcopy(self._idle)
            return obs, 0.0, False, False, info
        obs, reward, terminated, truncated, info = self.env.step(action)
        raise_swallowed()
        self._return += float(reward)
        self._length += 1
        self._trace = _crc(float(reward), _crc(obs, self._trace))
        is_over = self._length >= self._max_steps
        if not (terminated or truncated or is_over):
            return obs, reward, False, False, info
        # A wrapper may end an episode after a lost life although the game continues.
        own = info.get("episode") if self._counts_own_episodes else None
        if self._counts_own_episodes and own is None and not is_over:
            self._lost_life = True
            return obs, reward, terminated, truncated, info
        is_cut = is_over and not (terminated or truncated)
        result = {
            "seed": self._seeds[0],
            "return": self._return if own is None else float(own["r"]),
            "length": self._length if own is None else int(own["l"]),
            "is_cut": is_cut,
            "trace": self._trace,
        }
        return obs, reward, terminated, truncated or is_cut, {**info, _EVALUATED: result}

    def close(self) -> None:
        if not self._is_borrowed:
            self.env.close()


def _crc(value: Any, start: int) -> int:
    """A checksum of an observation or number that continues from ``start``."""
    if isinstance(value, Mapping):
        for key in value:
            start = _crc(value[key], start)
        return start
    if isinstance(value, tuple):
        for part in value:
            start = _crc(part, start)
        return start
    content = value.encode() if isinstance(value, str) else np.ascontiguousarray(value).data
    return zlib.crc32(content, start)
