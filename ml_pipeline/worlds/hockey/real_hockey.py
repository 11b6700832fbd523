"""RealHockey: the game of the package hockey-env as a two-player env, or against its opponent.

The adapter draws every random number from its own generator, starts each episode in a new Box2D
world, and reports the time limit as truncation. It can be pickled in mid-episode: the copy plays
the same actions again, checks the result and continues exactly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import Info
from ml_pipeline.extras import MissingExtraError, import_extra
from ml_pipeline.worlds.hockey.env import DISCRETE, game_spaces
from ml_pipeline.worlds.hockey.opponents import EITHER, SCRIPTED, drawn_opponent

MODES = {"normal": "NORMAL", "shooting": "TRAIN_SHOOTING", "defence": "TRAIN_DEFENSE"}
# What player 1 sees, from what player 0 sees: players swapped, positions and velocities negated.
_OTHER = np.array([*range(6, 12), *range(6), *range(12, 16), 17, 16])
_SIGN = np.array([-1, -1, 1, -1, -1, 1] * 2 + [-1] * 4 + [1] * 2, dtype=np.float64)


def _package() -> ModuleType:
    try:
        return importlib.import_module("hockey.hockey_env")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hockey":
            raise  # Box2D, which has an extra
        raise MissingExtraError(
            "the package hockey-env is not installed: pip install PATH_OR_GIT_URL (docs/hockey.md)"
        ) from error


class _Start(NamedTuple):
    """Everything that decides how an episode begins."""

    mode: str
    player_0_starts: bool
    seed: int


class _Game:
    """One env of the package; a pickle of it holds the start and the actions of its episode."""

    def __init__(self) -> None:
        self.env = _package().HockeyEnv()
        self.view: NDArray[np.float64]  # what player 0 sees: [18]
        self._start: _Start | None = None
        self._actions: list[NDArray[np.float32]] = []

    def start(self, start: _Start) -> None:
        """Begin an episode in a new world: contacts of the last episode change an old one."""
        env, package = self.env, _package()
        env.player1 = env.player2 = env.puck = env.goal_player_1 = env.goal_player_2 = None
        env.world_objects, env.drawlist = [], []
        env.world = package.Box2D.b2World([0, 0])
        env.player1_has_puck = env.player2_has_puck = 0  # env.reset() keeps them
        env.mode = MODES[start.mode]
        self.view, _ = env.reset(one_starting=start.player_0_starts, seed=start.seed)
        self._start, self._actions = start, []

    def step(self, action: NDArray[np.float32]) -> tuple[float, dict[str, Any]]:
        """The reward and info of player 0; ``action`` [8] is that of both players."""
        self._actions.append(action)
        self.view, reward, _, _, info = self.env.step(action)
        return reward, info

    def view_of_player_1(self) -> NDArray[np.float64]:
        """The package's ``obs_agent_two()``, but faster."""
        view: NDArray[np.float64] = _SIGN * self.view[_OTHER]
        return view

    def __reduce__(self) -> tuple[Callable[..., _Game], tuple[object, ...]]:
        if self._start is None:
            return _Game, ()
        return _repeat, (self._start, self._actions, self.view)


def _repeat(start: _Start, actions: list[NDArray[np.float32]], view: NDArray[np.float64]) -> _Game:
    """Play an episode again up to ``view``; Box2D cannot copy a world with its contacts."""
    game = _Game()
    game.start(start)
    for action in actions:
        game.step(action)
    if not np.array_equal(game.view, view):
        raise RuntimeError("RealHockey: this Box2D does not repeat the saved episode exactly")
    return game


class _NumPy:
    """NumPy with another ``random``."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class _Opponent:
    """The package's BasicOpponent, which draws from ``random`` instead of NumPy's global state."""

    keep_mode = True

    def __init__(self, random: np.random.Generator, *, weak: bool) -> None:
        self.weak = weak
        self.phase = random.uniform(0.0, np.pi)
        self._random = random
        self._law = self._package_law()

    def act(self, obs: NDArray[np.float64]) -> NDArray[np.float64]:
        action: NDArray[np.float64] = self._law(self, obs)
        return action

    def _package_law(self) -> FunctionType:
        """The package's function with our ``np.random``."""
        package = _package()
        act = package.BasicOpponent.act
        names = {**vars(package), "np": _NumPy(self._random)}
        return FunctionType(act.__code__, names, act.__name__, act.__defaults__)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_law"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._law = self._package_law()


class PackagePlayer:
    """The package's opponent for a batch of games; game i has a random generator of its own."""

    def __init__(self, *, weak: bool) -> None:
        self._weak = weak
        self._players: list[_Opponent] = []

    def act_batch(
        self, obs: NDArray[np.float32], deterministic: bool = True
    ) -> NDArray[np.float32]:
        """Actions [n, 4] for observations [n, 18]; they are random even if ``deterministic``."""
        for i in range(len(self._players), len(obs)):
            self._players.append(_Opponent(np.random.default_rng(i), weak=self._weak))
        rows = zip(self._players, np.asarray(obs, dtype=np.float64), strict=False)
        return np.array([player.act(row) for player, row in rows], dtype=np.float32)


class RealHockey(gym.Env[NDArray[np.float32], Any]):
    """Two players if ``opponent`` is None; else one against ``weak``, ``strong`` or ``either``.

    ``opponent`` and ``mode`` can be set at any time, and take effect at the next reset.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]  # Gymnasium has no ClassVar
        "render_modes": ["human", "rgb_array"],
        "render_fps": 50,
    }
    # In self-play without state and random numbers, so that a run can resume. Evaluations and
    # opponent= use the package's own.
    scripted = SCRIPTED
    judges: ClassVar[Mapping[str, Callable[[], PackagePlayer]]] = {
        name: partial(PackagePlayer, weak=name == "weak") for name in SCRIPTED
    }

    def __init__(
        self,
        opponent: str | None = None,
        mode: str = "normal",
        discrete: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode={render_mode}: unknown; choose human or rgb_array")
        self.render_mode = render_mode
        self.discrete = discrete
        self._has_one_player = opponent is not None
        self.opponent = opponent
        self.mode = mode
        for_two = not self._has_one_player
        self.observation_space, self.action_space = game_spaces(for_two, discrete=discrete)
        self._game = _Game()
        # The package declares 7 discrete actions and leaves out the shot.
        to_forces = self._game.env.discrete_to_continous_action
        self.moves = np.array([to_forces(move) for move in range(len(DISCRETE))])
        self._rival: _Opponent | None = None

    @property
    def opponent(self) -> str | None:
        """The scripted player 1, or None."""
        return self._opponent

    @opponent.setter
    def opponent(self, name: str | None) -> None:
        if (name is not None) != self._has_one_player:
            raise ValueError(f"opponent={name}: the number of players is fixed; make another env")
        if name is not None and name not in (*self.scripted, EITHER):
            known = ", ".join((*self.scripted, EITHER))
            raise ValueError(f"opponent={name}: unknown; choose {known}, or null for two players")
        self._opponent = name

    @property
    def mode(self) -> str:
        """normal, or the drills shooting and defence."""
        return self._mode

    @mode.setter
    def mode(self, name: str) -> None:
        if name not in MODES:
            raise ValueError(f"mode={name}: unknown; choose {', '.join(MODES)}")
        self._mode = name

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[NDArray[np.float32], Info]:
        super().reset(seed=seed)
        # The package alternates who starts and keeps the opponent's phase. Here the generator
        # decides both, so an episode depends on its seed alone.
        player_0_starts = bool(self.np_random.integers(2))
        self._game.start(_Start(self.mode, player_0_starts, int(self.np_random.integers(2**31))))
        if self.opponent is not None:
            name = drawn_opponent(self.np_random) if self.opponent == EITHER else self.opponent
            self._rival = _Opponent(self.np_random, weak=name == "weak")
        return self._shown_obs(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, Info]:
        forces = self.moves[action] if self.discrete else np.asarray(action)
        if self._rival is not None:
            forces = np.concatenate([forces, self._rival.act(self._game.view_of_player_1())])
        reward, info = self._game.step(np.clip(forces, -1.0, 1.0).astype(np.float32).ravel())
        env = self._game.env
        info["reward_opponent"] = env.get_reward_agent_two(env.get_info_agent_two())
        has_goal = env.winner != 0
        if not env.done:
            del info["winner"]
        return self._shown_obs(), reward, has_goal, env.done and not has_goal, info

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        env = self._game.env
        if self.render_mode == "human" and env.screen is None:
            # The package would start all of pygame, which complains if there is no sound card.
            display = import_extra("pygame", needed_by="render_mode=human").display
            display.init()
            env.screen = display.set_mode((_package().VIEWPORT_W, _package().VIEWPORT_H))
        frame: NDArray[np.uint8] | None = env.render(mode=self.render_mode)
        return frame

    def close(self) -> None:
        self._game.env.close()

    def _shown_obs(self) -> NDArray[np.float32]:
        """The observation, which a person sees too if the render mode is human."""
        if self.render_mode == "human":
            self.render()
        view = self._game.view
        if not self._has_one_player:
            view = np.stack([view, self._game.view_of_player_1()])
        return view.astype(np.float32)
