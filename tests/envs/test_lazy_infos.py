"""Infos of numbers are joined when they are first read, and then equal Gymnasium's."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Make
from gymnasium.vector import SyncVectorEnv
from tiny_envs import CountingEnv
from vec_envs import each_way, zeros

from ml_pipeline.envs.workers.lazy_infos import LazyInfos, can_wait, joined, packed, unpacked

INFOS: list[dict[str, Any]] = [
    {"float": 0.5, "int": 3, "bool": True, "double": np.float64(1 / 3)},
    {},
    {"single": np.float32(0.1), "long": np.int64(2**60), "short": np.int32(-4)},
    {"float": 1.5, "flag": np.bool_(False), "_float": 2.0, "nan": float("nan")},
    {"int": 2.7, "double": 4, "single": 1e-50},
]


class Reporting(CountingEnv):
    """Reports one of ``INFOS`` in every step, and in some steps an array."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        step = int(info["step"])
        info = dict(INFOS[step % len(INFOS)])
        if step % 7 == 6:
            info["array"] = np.array([step])
        return *rest, info


def described(infos: Any) -> Any:
    """Names, dtypes and values."""
    if isinstance(infos, np.ndarray):
        return str(infos.dtype), repr(infos.tolist())
    return {name: described(value) for name, value in infos.items()}


def env_fns() -> list[Callable[[], gym.Env[Any, Any]]]:
    return [lambda n=n: Reporting(n, reuse=False) for n in (4, 30, 11)]  # type: ignore[misc]


@each_way
def test_infos_equal_those_of_gymnasium_in_every_step(start: Make) -> None:
    env = start(env_fns())
    other = SyncVectorEnv(env_fns(), autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env.reset(seed=1)
    other.reset(seed=1)

    for _ in range(25):
        ours, theirs = (each.step(zeros(each))[4] for each in (env, other))
        assert described(ours) == described(theirs)


@each_way
def test_infos_that_are_read_later_are_those_of_their_step(start: Make) -> None:
    env = start(env_fns())
    other = SyncVectorEnv(env_fns(), autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env.reset(seed=1)
    other.reset(seed=1)

    ours, theirs = ([each.step(zeros(each))[4] for _ in range(25)] for each in (env, other))

    assert [described(each) for each in ours] == [described(each) for each in theirs]


@each_way
def test_infos_that_no_one_reads_are_not_joined(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = start([lambda: Reporting(30)] * 3)
    env.reset(seed=1)
    monkeypatch.setattr(env, "_add_info", lambda *arguments: pytest.fail("joined"))
    env.step(zeros(env))
    infos = env.step(zeros(env))[4]

    assert isinstance(infos, LazyInfos)
    assert dict.__len__(infos) == 0
    assert infos["short"].tolist() == [-4, -4, -4]
    assert dict.__len__(infos) == 6


def lazy() -> LazyInfos:
    rows = [(0, packed({"x": 1.0})), (2, packed({"x": 2.0}))]
    return LazyInfos(lambda: joined(rows, 3))


READS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda infos: infos["x"].tolist(),
    "in": lambda infos: ("x" in infos, "y" in infos),
    "len": len,
    "bool": bool,
    "iter": list,
    "reversed": lambda infos: list(reversed(infos)),
    "dict": lambda infos: described(dict(infos)),
    "**": lambda infos: described({**infos}),
    "call(**)": lambda infos: described((lambda **named: named)(**infos)),
    "|": lambda infos: described(infos | {"y": np.ones(1)}),
    "reflected |": lambda infos: described({"y": np.ones(1)} | infos),
    "get": lambda infos: infos.get("x").tolist(),
    "items": lambda infos: [name for name, _ in infos.items()],
    "values": lambda infos: [value.tolist() for value in infos.values()],
    "keys": lambda infos: list(infos.keys()),
    "pop": lambda infos: (infos.pop("x").tolist(), list(infos)),
    "popitem": lambda infos: infos.popitem()[0],
    "setdefault": lambda infos: infos.setdefault("x", 1).tolist(),
    "update": lambda infos: [infos.update(y=1), list(infos)],
    "update another": lambda infos: (lambda other: [other.update(infos), list(other)])({}),
    "set": lambda infos: [infos.__setitem__("y", 1), list(infos)],
    "del": lambda infos: [infos.__delitem__("x"), list(infos)],
    "clear": lambda infos: [infos.clear(), list(infos)],
    "|=": lambda infos: list(infos.__ior__({"y": 1})),
    "copy": lambda infos: described(infos.copy()),
    "copy.copy": lambda infos: described(copy.copy(infos)),
    "deepcopy": lambda infos: described(copy.deepcopy(infos)),
    "pickle": lambda infos: described(pickle.loads(pickle.dumps(infos))),
    "repr": repr,
    "==": lambda infos: (infos == {}, infos != {}, operator.eq({}, infos)),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_sees_the_joined_infos(read: str) -> None:
    plain = {"x": np.array([1.0, 0.0, 2.0]), "_x": np.array([True, False, True])}

    assert READS[read](lazy()) == READS[read](plain)


def test_every_method_of_a_dict_reads_the_infos_first() -> None:
    own = {name for name in vars(LazyInfos) if not name.startswith("_")}

    assert {name for name in vars(dict) if not name.startswith("_")} - own == {"fromkeys"}


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_is_a_plain_dict(duplicate: Any) -> None:
    assert type(duplicate(lazy())) is dict


@pytest.mark.parametrize(
    ("info", "is_packed"),
    [
        ({"float": 0.1, "double": np.float64(1 / 3), "single": np.float32(0.1)}, True),
        ({"nan": float("nan"), "infinity": np.float32("inf")}, True),
        ({"float": 0.5, "long": np.int64(2**60)}, False),
        ({"text": "a"}, False),
    ],
)
def test_a_sent_info_keeps_the_types_of_its_values(info: dict[str, Any], is_packed: bool) -> None:
    sent = packed(info)
    again = unpacked(pickle.loads(pickle.dumps(sent)))

    assert isinstance(sent, tuple) is is_packed
    assert [(n, type(v), repr(v)) for n, v in again.items()] == [
        (n, type(v), repr(v)) for n, v in info.items()
    ]


@pytest.mark.parametrize("value", ["text", None, [1], np.ones(2), 1 + 2j, {"a": 1.0}])
def test_an_info_that_an_env_may_change_later_is_joined_at_once(value: Any) -> None:
    assert can_wait({"number": 1.0})
    assert not can_wait({"number": 1.0, "value": value})
    assert not can_wait({"final_obs": 1.0})
    assert not can_wait(packed({"final_obs": 1.0}))
