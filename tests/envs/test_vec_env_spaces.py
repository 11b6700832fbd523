"""Observations and actions of every space, compared with Gymnasium's own vector envs."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Make
from faulty_envs import Colour, GivenEnv
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tiny_envs import SpaceEnv
from vec_envs import WAYS, each_way, each_way_shared_slow, flat, forked, trajectory, zeros

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import ParallelEnv, WorkerError

SPACES: dict[str, Any] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "box float16": spaces.Box(-1, 1, (3,), np.float16),
    "box bool": spaces.Box(0, 1, (3,), np.bool_),
    "scalar box": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi discrete": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "stacked sequence": spaces.Sequence(spaces.Box(0, 1, (2,), np.float32), stack=True),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3)),
    "one of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32))),
    "dict": spaces.Dict(
        {
            "vector": spaces.Box(-1, 1, (2,), np.float32),
            "deeper": spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8)}),
            "words": spaces.Text(4),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Tuple((spaces.MultiBinary(2), Colour())))),
    "custom": Colour(),
}
SPACES["all"] = spaces.Dict(copy.deepcopy(SPACES))


@pytest.mark.parametrize(
    ("space", "action", "mode"),
    [
        *((space, space, AutoresetMode.SAME_STEP) for space in SPACES if space != "all"),
        pytest.param("all", "all", AutoresetMode.SAME_STEP, marks=pytest.mark.slow),
        *(("all", "discrete", mode) for mode in AutoresetMode),
    ],
)
def test_every_space_and_mode_equals_sync_vector_env(
    space: str, action: str, mode: AutoresetMode
) -> None:
    env_fns = [partial(SpaceEnv, SPACES[space], SPACES[action])] * 3
    expected = trajectory(SyncVectorEnv, env_fns, mode, 12)

    ways = [WAYS["shared"]]  # an env of this process, and two in a worker
    if space == "all":
        ways = [*WAYS.values(), *([partial(ParallelEnv, n_workers=2)] if action == "all" else [])]
    for make in ways:
        assert trajectory(make, env_fns, mode, 12) == expected


def test_equal_spaces_may_have_their_keys_in_another_order() -> None:
    parts = {name: SPACES[name] for name in ("text", "image", "box", "sequence", "discrete")}
    orders = [dict(parts.items()), dict(reversed(parts.items()))]
    env_fns = [
        partial(SpaceEnv, spaces.Dict(list(order.items())), spaces.Discrete(2)) for order in orders
    ]
    expected = trajectory(SyncVectorEnv, env_fns, AutoresetMode.SAME_STEP, 25)

    for make in WAYS.values():
        assert trajectory(make, env_fns, AutoresetMode.SAME_STEP, 25) == expected


def differing(i: int) -> Any:
    """A space of env ``i``, with bounds and numbers of choices of its own."""
    return spaces.Dict(
        {
            "box": spaces.Box(0, i + 1, (3,), np.float32),
            "choice": spaces.Discrete(3 + i, start=i),
            "choices": spaces.MultiDiscrete([2, 3 + i]),
            "deeper": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-i - 1, 1, (), np.float64))),
            "text": spaces.Text(4),
        }
    )


BATCHED = spaces.Dict(
    {"box": spaces.Box(0, 9, (3, 3), np.float32), "choice": spaces.MultiDiscrete([9, 9, 9])}
)
SINGLE = spaces.Dict({"box": spaces.Box(0, 9, (3,), np.float32), "choice": spaces.Discrete(9)})


def test_envs_with_different_bounds_equal_sync_vector_env() -> None:
    env_fns = [partial(SpaceEnv, differing(i), spaces.Discrete(2)) for i in range(3)]
    reference = partial(SyncVectorEnv, observation_mode="different")
    expected = trajectory(reference, env_fns, AutoresetMode.SAME_STEP, 25)
    batched = reference(env_fns).observation_space

    for make in WAYS.values():
        different = partial(make, observation_mode="different")
        assert trajectory(different, env_fns, AutoresetMode.SAME_STEP, 25) == expected
        with contextlib.closing(different(env_fns)) as env:
            assert env.observation_space == batched
            assert env.single_observation_space == differing(0)


@each_way
def test_a_pair_of_spaces_is_used_as_given(make: Make) -> None:
    parts = [spaces.Dict({k: differing(i)[k] for k in ("box", "choice")}) for i in range(3)]
    env = make(
        [partial(SpaceEnv, part, spaces.Discrete(2)) for part in parts],
        observation_mode=(BATCHED, SINGLE),
    )

    assert env.observation_space is BATCHED
    assert env.single_observation_space is SINGLE
    assert env.reset(seed=1)[0] in BATCHED


def test_envs_with_different_bounds_can_be_resized(start: Make) -> None:
    env = start(
        [partial(SpaceEnv, differing(i), spaces.Discrete(2)) for i in range(3)],
        observation_mode="different",
    )
    before = env.observation_space

    assert env.resize(5)[0] in env.observation_space
    assert env.observation_space["choice"].nvec.tolist() == [3, 4, 5, 3, 4]
    env.resize(3)
    assert env.observation_space == before


BOX = spaces.Box(0, 1, (3,), np.float32)


@each_way_shared_slow
@pytest.mark.parametrize(
    ("mode", "space", "words"),
    [
        ("same", spaces.Box(0, 2, (3,), np.float32), "env 1 .*set observation_mode='different'"),
        ("different", spaces.Box(0, 1, (4,), np.float32), r"env 1 .*shapes and dtypes of .*\(3,\)"),
        ("different", spaces.Box(0, 1, (3,), np.float64), "env 1 .*float64"),
        ("different", spaces.Discrete(3), r"env 1 has observation_space Discrete\(3\)"),
        ((BATCHED, SINGLE), BOX, "env 0 .*shapes and dtypes"),
        ("other", BOX, "observation_mode='other': must be 'same', 'different', or a pair"),
        ((BOX, 3), BOX, "observation_mode=.*both must be spaces"),
    ],
)
def test_spaces_that_do_not_fit_the_observation_mode_are_refused(
    make: Make, mode: Any, space: Any, words: str
) -> None:
    env_fns = [partial(SpaceEnv, each, spaces.Discrete(2)) for each in (BOX, space)]

    with pytest.raises((WorkerError, ValueError, TypeError), match=words):
        make(env_fns, observation_mode=mode)


def test_a_given_pair_of_spaces_cannot_be_resized(start: Make) -> None:
    batched = spaces.Box(0, 1, (2, 3), np.float32)
    env = start([partial(SpaceEnv, BOX, BOX)] * 2, observation_mode=(batched, BOX))

    with pytest.raises(ValueError, match="fixes the number of envs"):
        env.resize(3)


@each_way
def test_observations_never_change_after_they_are_returned(make: Make) -> None:
    env = make([partial(SpaceEnv, SPACES["all"], spaces.Discrete(2))] * 2)
    kept = [env.reset()[0], *(env.step(zeros(env))[0] for _ in range(3))]
    before = flat(kept)
    for _ in range(20):
        env.step(zeros(env))

    assert flat(kept) == before


@pytest.mark.parametrize("side", [64, 133, 134, 180])  # around the size of a socket buffer
def test_spaces_of_any_size_reach_the_workers(make: Make, side: int) -> None:
    space = spaces.Box(0, 255, (side, side, 3), np.uint8)
    env = make([partial(SpaceEnv, space, spaces.Discrete(2))] * 4, n_workers=4)

    assert env.reset()[0].shape == (4, side, side, 3)


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(5), 3),
        (spaces.Discrete(5), np.int64(3)),
        (spaces.Box(-1, 1, (), np.float32), np.array(0.5, np.float32)),
        (spaces.Box(-1, 1, (), np.float32), np.float32(0.5)),
        (spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, ()))), (3, np.float32(0.5))),
    ],
)
def test_final_observations_of_single_numbers_are_those_of_the_env(space: Any, obs: Any) -> None:
    def final(make: Any) -> list[str]:
        with contextlib.closing(make([partial(GivenEnv, space, obs)] * 3)) as env:
            env.set_attr("length", [1, 1000, 1])
            env.reset()
            return [repr(each) for each in env.step(zeros(env))[4]["final_obs"]]

    expected = final(partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP))
    assert expected == [repr(obs), "None", repr(obs)]
    for make in WAYS.values():
        assert final(make) == expected


def int32_discrete(n: int) -> spaces.Discrete:
    space = spaces.Discrete(n)
    space.dtype = np.dtype(np.int32)  # Gymnasium 1.1 has no argument for it
    return space


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(3), [0, 1, 2]),
        (spaces.Discrete(3), (np.int64(0), 1, np.int8(2))),
        (int32_discrete(3), np.array([0, 1, 2])),
        (spaces.MultiBinary(2), [[0, 1], (1, 0), np.array([1, 1])]),
        (spaces.Box(-1, 1, (), np.float32), [0.1, 0.2, 0.3]),
        (spaces.Box(-1, 1, (2,), np.float32), np.array([[0.1, 0.2]] * 3)),
        (spaces.Box(-1, 1, (2,), np.float32), [[0.1, 0.2], [0.3, 1], [0, 0]]),
        (
            spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Text(4)}),
            {"a": [0, 1, 2], "b": ("x", "y", "z")},
        ),
        (
            spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (), np.float32))),
            (np.array([0, 1, 2]), [0.1, 0.2, 0.3]),
        ),
    ],
)
def test_actions_are_handed_over_as_sync_vector_env_does(space: Any, actions: Any) -> None:
    def seen(make: Any) -> list[Any]:
        with contextlib.closing(make([partial(SpaceEnv, BOX, space)] * 3)) as env:
            env.reset(seed=5)
            return [flat(env.step(actions)[4]) for _ in range(10)]

    expected = seen(partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP))
    for make in WAYS.values():
        assert seen(make) == expected


@pytest.mark.parametrize("way", [WAYS["serial"], WAYS["shared"]])
def test_an_env_may_keep_an_action_that_the_caller_reuses(start: Make) -> None:
    class KeepingEnv(SpaceEnv):
        def step(self, action: Any) -> Any:
            self.kept = [*getattr(self, "kept", []), action]
            return super().step(action)

    env = start([partial(KeepingEnv, BOX, spaces.Box(-1, 1, (2,), np.float32))] * 2)
    actions = np.zeros((2, 2))  # float64: handed over as it is
    for i in range(3):
        actions[:] = i / 4
        env.step(actions)

    assert [each.tolist() for each in env.get_attr("kept")[0]] == [[0, 0], [0.25, 0.25], [0.5, 0.5]]


BAD_OBSERVATIONS = [
    (spaces.Box(-1, 1, (4,), np.float32), np.zeros(1, np.float32), r"shape \(1,\).*\(4,\)"),
    (spaces.Box(-1, 1, (2,), np.float32), np.zeros((2, 1), np.float32), r"shape \(2, 1\)"),
    (spaces.Box(-1, 1, (2,), np.float32), np.zeros((), np.float32), r"shape \(\)"),
    (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.float32), "float32.*uint8"),
    (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 300]), "int64.*uint8.*300"),
    (spaces.Box(-9, 9, (2,), np.float32), np.array([1j, 2j]), "complex128"),
    (spaces.Box(-9, 9, (1,), np.float32), np.array(["a"]), "not a number"),
    (spaces.Box(-9, 9, (2,), np.float32), None, "shape"),
    (spaces.Discrete(3), 1.5, "float64.*int64"),
    (spaces.Box(-1e9, 1e9, (1,), np.float32), np.array([2**24 + 1]), "cannot hold"),
    (spaces.Box(-1, 1, (1,), np.float32), np.array([1e300]), "cannot hold"),
    (spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Discrete(3)}), {"a": 1}, "keys"),
    (spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))), (1,), "2 parts"),
]


@each_way_shared_slow
@pytest.mark.parametrize(("space", "obs", "words"), BAD_OBSERVATIONS)
def test_an_observation_that_does_not_fit_its_space_is_an_error(
    make: Make, space: Any, obs: Any, words: str
) -> None:
    env = make([partial(GivenEnv, space, obs)] * 2, seed=7)

    with pytest.raises(WorkerError, match=rf"env [01] \(seed [78]\)[\s\S]*{words}"):
        env.reset()


@each_way
def test_a_cast_of_precision_is_done_and_warned_about_once(make: Make) -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    env = make([partial(GivenEnv, box, np.array([0.5, 0.25]))] * 4, seed=7)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.reset()
        obs = [env.step(zeros(env))[0] for _ in range(3)][-1]

    assert obs.dtype == np.float32
    assert obs.tolist() == [[0.5, 0.25]] * 4
    (warning,) = [each for each in caught if issubclass(each.category, UserWarning)]
    assert re.search("dtype float64.*dtype float32", str(warning.message))


@each_way_shared_slow
@pytest.mark.parametrize(
    ("space", "actions", "words"),
    [
        (spaces.Discrete(3), np.array([0, 3]), r"action 3 of env 1 is not in Discrete\(3\)"),
        (spaces.Discrete(3, start=1), np.array([0, 1]), "action 0 of env 0"),
        (spaces.Discrete(3), np.array([0.0, 1.0]), "must be integers"),
        (spaces.Discrete(3), np.array([0, 1, 2]), r"must have shape \(2,\), got \(3,\)"),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0], [1, 3]]), "of env 1"),
        (spaces.MultiBinary(2), np.array([[0, 1], [2, 0]]), "of env 1"),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((2, 3)), "shape"),
        (spaces.Box(-9, 9, (1,), np.int8), np.array([[300], [0]]), "dtype int8, which cannot hold"),
        (spaces.Text(4), ["a"], "actions for 2 envs, got 1"),
    ],
)
def test_a_bad_action_is_refused_before_anything_is_sent(
    start: Make, space: Any, actions: Any, words: str
) -> None:
    env = start([partial(SpaceEnv, spaces.Discrete(3), space)] * 2, seed=7)

    with pytest.raises((ValueError, TypeError), match=words):
        env.step(actions)

    env.action_space.seed(1)
    env.step(env.action_space.sample())  # nothing is pending


WRAPPERS = [
    gym.wrappers.vector.RecordEpisodeStatistics,
    gym.wrappers.vector.NormalizeObservation,
    gym.wrappers.vector.DictInfoToList,
    gym.wrappers.vector.FlattenObservation,
]


@pytest.mark.parametrize(
    "mode",
    [AutoresetMode.SAME_STEP, pytest.param(AutoresetMode.NEXT_STEP, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_vector_wrappers_behave_as_on_async_vector_env(wrapper: Any, mode: AutoresetMode) -> None:
    def play(make: Make) -> list[Any] | str:
        env_fns = [EnvFactory("MountainCar-v0", kwargs={"max_episode_steps": 10})] * 2
        with contextlib.closing(make(env_fns, autoreset_mode=mode)) as env:
            try:
                wrapped = wrapper(env)
                seen = flat(list(wrapped.reset(seed=3)))
                for _ in range(12):  # an episode has 10 steps
                    *step, infos = wrapped.step(np.array([0, 2]))
                    if isinstance(infos, dict):
                        infos.pop("episode", None)  # contains the elapsed time
                    seen += flat([*step, infos])
            except Exception as error:
                return f"{type(error).__name__}: {error}".replace("ParallelEnv", "AsyncVectorEnv")
            return seen

    assert play(forked) == play(partial(AsyncVectorEnv, context="fork"))
