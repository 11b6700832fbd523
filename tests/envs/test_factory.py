"""EnvFactory: ids, dotted paths, wrappers in order, and clear errors if one is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import small
from gymnasium import spaces
from tiny_envs import CountingEnv

from ml_pipeline import load
from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.run import train
from ml_pipeline.envs.factory import EnvError, EnvFactory, allowed_action
from ml_pipeline.envs.trial import try_env
from ml_pipeline.extras import MissingExtraError, import_extra, missing_extra
from ml_pipeline.targets import TargetError


def test_a_target_overrides_the_id_and_gets_the_kwargs() -> None:
    env = EnvFactory("CartPole-v1", "tiny_envs.CountingEnv", {"length": 9})()

    assert env.get_wrapper_attr("length") == 9


def test_wrappers_are_applied_in_order_the_first_innermost() -> None:
    wrappers = {
        "scale": {"_target_": "tiny_envs.scale_reward", "factor": 2.0},
        "clip": {"_target_": "gymnasium.wrappers.ClipReward", "max_reward": 15.0},
    }
    env = EnvFactory(None, "tiny_envs.CountingEnv", {}, wrappers)()
    env.reset(seed=1)

    assert env.step(0)[1] == 15.0  # 2 * 10, clipped; in the other order 20


def test_a_factory_can_be_pickled() -> None:
    factory = EnvFactory("CartPole-v1", kwargs={"render_mode": None})

    assert cloudpickle.loads(cloudpickle.dumps(factory)) == factory


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (EnvFactory("PongNoFrameskip-v4"), "write env=atari env.id=ALE/Pong-v5"),
        (EnvFactory("Pong-ramDeterministic-v4"), "write env=atari env.id=ALE/Pong-v5"),
        (EnvFactory("CartPol-v1"), "CartPol-v1 is not a registered .* did you mean CartPole-v1"),
        (EnvFactory("CartPole-v99"), "did you mean CartPole-v1"),
        (
            EnvFactory("Zzzzzz-v0"),
            "env.id=Zzzzzz-v0 is not a registered environment; if a package registers it, "
            "name the package first: env.id=PACKAGE:Zzzzzz-v0",
        ),
        (EnvFactory("tiny_envs:Zzzzzz-v0"), "importing tiny_envs does not register it"),
        (
            EnvFactory("CartPole-v1", kwargs={"size": 3}),
            "with env.kwargs {'size': 3} cannot be made",
        ),
        (
            EnvFactory("FrozenLake-v1", kwargs={"map_name": "9x9"}),
            "cannot be made: KeyError: '9x9'",
        ),
    ],
)
def test_an_unknown_id_or_argument_is_named(
    factory: EnvFactory, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Registered once another test has imported ale_py.
    monkeypatch.delitem(gym.registry, "PongNoFrameskip-v4", raising=False)
    with pytest.raises(EnvError, match=words):
        factory()


@pytest.mark.parametrize(
    ("target", "kwargs", "words"),
    [
        ("MyEnv", {}, "env.target=MyEnv: this is not a dotted path"),
        ("no_such_module.MyEnv", {}, "no module named 'no_such_module'; install it, run from"),
        ("tiny_envs.MyEnv", {}, "module tiny_envs has no 'MyEnv'"),
        ("tiny_envs.CountngEnv", {}, "has no 'CountngEnv'; did you mean CountingEnv"),
        ("tiny_envs.STARTED", {}, "module tiny_envs has no 'STARTED'"),
        ("tiny_envs.CountingEnv", {"size": 3}, "env.kwargs.size is unknown; CountingEnv takes"),
        ("tiny_envs.FaultyEnv", {}, "FaultyEnv cannot be called: missing a required argument"),
        ("pathlib.Path", {}, "returned PosixPath, not a gymnasium.Env"),
    ],
)
def test_a_target_that_does_not_exist_or_fit_is_named(
    target: str, kwargs: dict[str, int], words: str
) -> None:
    with pytest.raises(TargetError, match=words):
        EnvFactory(None, target, kwargs)()


PARTS = spaces.Dict(
    deep=spaces.Tuple((spaces.Discrete(2), spaces.Box(0.5, 0.5, ()))), lane=spaces.Discrete(3)
)


def as_lists(action: Any) -> Any:
    if isinstance(action, dict):
        return {name: as_lists(part) for name, part in action.items()}
    return (
        tuple(map(as_lists, action)) if isinstance(action, tuple) else np.asarray(action).tolist()
    )


@pytest.mark.parametrize(
    ("space", "mask", "wanted"),
    [
        (spaces.Discrete(3), [0, 0, 1], 2),
        (spaces.MultiDiscrete([2, 3]), [0, 1, 1, 0, 0], [1, 0]),
        (spaces.MultiDiscrete([[2, 3]], start=[[5, 0]]), [0, 1, 0, 0, 1], [[6, 2]]),
        (spaces.MultiDiscrete([[2, 3]]), ([1, 0], [0, 1, 0]), [[0, 1]]),
        (spaces.MultiBinary(2), [0, 1, 1, 0], [1, 0]),
        (PARTS, {"lane": [0, 0, 1], "deep": ([1, 0], None)}, {"deep": (0, 0.5), "lane": 2}),
        (PARTS, {"lane": [0, 1, 0], "deep": ([0, 1], None)}, {"deep": (1, 0.5), "lane": 1}),
        (PARTS, np.array([0, 1, 0, 0, 1]), {"deep": (1, 0.5), "lane": 2}),
    ],
)
def test_an_allowed_action_respects_the_mask(space: Any, mask: Any, wanted: Any) -> None:
    env: Any = SimpleNamespace(action_space=space)

    action = allowed_action(env, None, {"action_mask": mask})

    assert as_lists(action) == wanted
    assert action in space


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ({"_target_": "tiny_envs.scale_reward", "by": 2.0}, r"env.wrappers.mine.by is unknown"),
        ({"_target_": "gymnasium.wrappers.TimeLimit"}, r"env.wrappers.mine: .*'max_episode_steps'"),
        ({"factor": 2.0}, r"env.wrappers.mine needs a _target_"),
        (
            {"_target_": "gymnasium.wrappers.TransformReward", "func": "numpy.sign"},
            r"env.wrappers.mine.func=numpy.sign: TransformReward takes a function here, which a",
        ),
        ({"_target_": "builtins.id"}, r"env.wrappers.mine: builtins.id returned int, not a gymn"),
    ],
)
def test_a_wrong_wrapper_is_named_by_its_key(wrapper: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        EnvFactory("CartPole-v1", wrappers={"mine": wrapper})()


@pytest.mark.parametrize(
    ("message", "command"),
    [
        (
            "Box2D is not installed, you can install it by run `pip install swig`",
            "make box2d, or pip install swig",
        ),
        (
            'MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`',
            r'make mujoco, or pip install "ml_pipeline\[mujoco\]"',
        ),
        ("Namespace ALE not found.", r'make atari, or pip install "ml_pipeline\[atari\]"'),
        ("No module named 'ale_py'", r'make atari, or pip install "ml_pipeline\[atari\]"'),
        ("No module named 'pyboy'", r'pip install "ml_pipeline\[gameboy\]"'),
        ("No module named 'gymnax'", r'make jax, or pip install "ml_pipeline\[jax\]"'),
        ("No module named 'craftax'", "pip install craftax"),
        ("No module named 'mujoco_playground'", "pip install playground"),
        ("No module named 'minigrid'", r'pip install "ml_pipeline\[minigrid\]"'),
        ("No module named 'pettingzoo'", r'pip install "ml_pipeline\[pettingzoo\]"'),
        ("No module named 'matplotlib'", r'pip install "ml_pipeline\[plots\]"'),
        ("pygame is not installed", r'pip install "gymnasium\[classic-control\]"'),
    ],
)
def test_a_missing_extra_comes_with_its_install_command(message: str, command: str) -> None:
    error = missing_extra("env.id=X", ImportError(message))

    assert re.search(f"env.id=X needs .* which is not installed: {command}", str(error))


def test_an_env_in_jax_without_jax_says_how_to_install_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jax_env", "jax_libraries"):
        monkeypatch.delitem(sys.modules, f"ml_pipeline.envs.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)

    with pytest.raises(MissingExtraError, match=r"Gymnax needs jax, .* not installed: make jax"):
        train([*small(), "env=gymnax"])


def test_a_missing_package_with_a_similar_name_gets_no_command() -> None:
    with pytest.raises(MissingExtraError, match=r"needs a package .*: No module named 'scalene_x'"):
        import_extra("scalene_x", needed_by="plots")


def test_a_missing_hockey_env_comes_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hockey.hockey_env", None)
    target = "ml_pipeline.worlds.hockey.real_hockey.RealHockey"

    with pytest.raises(MissingExtraError) as caught:
        EnvFactory(None, target=target)()

    assert str(caught.value) == (
        f"env.target={target}: the package hockey-env is not installed: "
        "pip install PATH_OR_GIT_URL (docs/hockey.md)"
    )


def test_texts_of_a_dict_observation_are_left_out_and_named() -> None:
    both = {"words": spaces.Text(4), "x": spaces.Box(-1.0, 1.0, (2,))}
    arguments = {"observation_space": spaces.Dict(both), "action_space": spaces.Discrete(2)}
    factory = EnvFactory(None, "tiny_envs.SpaceEnv", arguments)

    env = factory()

    assert env.observation_space == spaces.Dict({"x": both["x"]})
    assert list(env.reset(seed=1)[0]) == ["x"]
    assert list(env.step(0)[0]) == ["x"]
    assert try_env(factory, "mine").remarks[0].startswith("leaves 'words' out of the observation")


def test_minigrid_trains_by_its_id(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minigrid", reason="needs the extra: pip install -e '.[minigrid]'")

    run = train([*small(), "env.id=MiniGrid-Empty-5x5-v0", "vec_env=serial"]).run_dir

    assert "MiniGrid-Empty-5x5-v0: leaves 'mission' out" in capsys.readouterr().out
    assert load(run).observation_space["image"].high.max() == 10
    obs, _ = gym.make("MiniGrid-Empty-5x5-v0").reset(seed=1)
    assert load(run).predict(obs) in range(7)


class Grid(CountingEnv):
    """Observes symbols, and declares 255 as their bound, as MiniGrid does."""

    def __init__(self) -> None:
        super().__init__()
        image = spaces.Box(0, 255, (7, 7, 3), np.uint8)
        self.observation_space = spaces.Dict({"image": image, "direction": spaces.Discrete(4)})

    def _observe(self) -> Any:
        return {"image": np.full((7, 7, 3), (8, 5, 1), np.uint8), "direction": 2}


def bounds_of_symbols(highest: Any) -> dict[str, Any]:
    target = "ml_pipeline.envs.wrappers.symbols.SymbolBounds"
    return {"symbols": {"_target_": target, "highest": highest}}


def test_bounds_of_symbols_change_the_space_and_no_value() -> None:
    plain = EnvFactory(id=None, target="test_factory.Grid")()

    env = EnvFactory(None, "test_factory.Grid", wrappers=bounds_of_symbols([10, 5, 3]))()

    assert isinstance(env.observation_space, spaces.Dict)
    assert env.observation_space["image"].high[0, 0].tolist() == [10, 5, 3]
    assert env.observation_space["direction"] == spaces.Discrete(4)
    assert np.array_equal(env.reset(seed=1)[0]["image"], plain.reset(seed=1)[0]["image"])
    assert env.step(0)[0] in env.observation_space


@pytest.mark.parametrize(
    ("highest", "words"),
    [
        ([10, 5], "needs one number for each of the last axis"),
        ([10, 5, 0], "must be from 1 to 255"),
    ],
)
def test_wrong_bounds_of_symbols_are_refused(highest: Any, words: str) -> None:
    with pytest.raises(EnvError, match=rf"env.wrappers.symbols cannot be made: .*{words}"):
        EnvFactory(None, "test_factory.Grid", wrappers=bounds_of_symbols(highest))()


@pytest.mark.parametrize(
    ("words", "is_bounded"),
    [
        (["env.id=MiniGrid-Empty-5x5-v0"], True),
        (["++env.id='BabyAI-GoToObj-v0'"], True),
        (["env.id=minigrid:MiniGrid-DoorKey-5x5-v0"], True),
        (["env=minigrid", "env.id=MiniGrid-Empty-8x8-v0"], True),
        (["env.id=MiniGrid-Empty-5x5-v0", "env.wrappers.symbols=null"], False),
        (["env.id=CartPole-v1"], False),
        (["env=pong"], False),
    ],
)
def test_ids_of_minigrid_get_the_bounds_of_its_symbols(words: list[str], is_bounded: bool) -> None:
    config = checked_config(compose_config(words))

    assert ("symbols" in config.env.wrappers) == is_bounded
    assert config.env.id != "CartPole-v1" or words == ["env.id=CartPole-v1"]


def test_run_with_symbols_resumes_as_it_was_with_and_without_bounds(here: Path) -> None:
    target = bounds_of_symbols([10, 5, 3])["symbols"]["_target_"]
    bounds = f"+env.wrappers.symbols={{_target_: {target}, highest: [10, 5, 3]}}"
    returned = []
    for words in ([], [bounds]):
        command = [*small(), "env.target=test_factory.Grid", *words]
        first = train([*command, "total_steps=32"])
        resumed = train([f"resume={first.run_dir}", "total_steps=64"])
        whole = train(command)
        weights = whole.agent.state_dict()["model"]
        for name, weight in resumed.agent.state_dict()["model"].items():
            assert torch.equal(weight, weights[name])
        returned.append(whole.agent)
        obs = Grid()._observe()
        assert load(whole.run_dir).predict(obs) in range(2)

    plain, bounded = (agent.greedy().preprocess for agent in returned)
    image = torch.from_numpy(Grid()._observe()["image"])[None]
    inputs = {"image": image, "direction": torch.tensor([2])}
    assert plain(inputs)["image"].max() == pytest.approx(8 / 255)
    assert bounded(inputs)["image"][0, 0, 0].tolist() == pytest.approx([0.8, 1.0, 1 / 3])
