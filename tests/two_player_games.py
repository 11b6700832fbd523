"""Small two-player games whose results are known. Workers import this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ml_pipeline.games.two_players import both_spaces

PULLS = np.array([[0.0], [0.3], [1.0]], dtype=np.float32)  # of the discrete actions


class Puller:
    """A scripted player that always pulls equally hard."""

    def __init__(self, pull: float) -> None:
        self.pull = pull

    def act_batch(self, obs: Any, deterministic: bool = True) -> Any:
        return np.full((len(obs), 1), self.pull, dtype=np.float32)


class TugOfWar(gym.Env[Any, Any]):
    """Who pulls the rope past 1 wins; after 20 steps it is a draw. A player sees rope and time.

    ``luck``: with this probability the result is drawn at the start, equally among the three.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    scripted: ClassVar[Mapping[str, Callable[[], Puller]]] = {
        "weak": partial(Puller, 0.3),
        "strong": partial(Puller, 1.0),
    }

    moves: ClassVar[Any] = PULLS

    def __init__(
        self,
        opponent: str | None = None,
        luck: float = 0.0,
        discrete: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.opponent = opponent
        self.luck = luck
        self.discrete = discrete
        self.render_mode = render_mode
        obs: gym.Space[Any] = spaces.Box(-4.0, 4.0, (2,), np.float32)
        act: gym.Space[Any] = spaces.Box(0.0, 1.0, (1,), np.float32)
        if discrete:
            act = spaces.Discrete(len(PULLS))
        self.observation_space = both_spaces(obs) if opponent is None else obs
        self.action_space = both_spaces(act) if opponent is None else act
        self.rope, self.time = 0.0, 0
        self.fate: int | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.rope, self.time = float(self.np_random.uniform(-0.1, 0.1)), 0
        is_lucky = self.np_random.random() < self.luck
        self.fate = int(self.np_random.integers(-1, 2)) if is_lucky else None
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        pulls = PULLS[action] if self.discrete else np.asarray(action)
        if self.opponent is not None:
            rival = self.scripted[self.opponent]().act_batch(np.zeros((1, 2)))[0]
            pulls = np.stack([pulls, rival])
        self.time += 1
        self.rope += 0.5 * float(pulls[0, 0] - pulls[1, 0])
        has_won = abs(self.rope) >= 1.0
        is_over = self.time >= 20
        if not (has_won or is_over):
            return self._seen(), 0.0, False, False, {}
        winner = int(np.sign(self.rope)) if has_won else 0
        winner = winner if self.fate is None else self.fate
        return self._seen(), float(winner), has_won, not has_won, {"winner": winner}

    def _seen(self) -> Any:
        seen = np.array([[self.rope, self.time / 20], [-self.rope, self.time / 20]], np.float32)
        return seen if self.opponent is None else seen[0]

    def render(self) -> Any:
        frame = np.zeros((32, 64, 3), dtype=np.uint8)
        frame[:, int(np.clip(32 + 30 * self.rope, 0, 63))] = 255
        return frame


class OnlyForTwo(TugOfWar):
    """It has no opponent of its own."""

    scripted: ClassVar[Mapping[str, Callable[[], Puller]]] = {}

    def __init__(self, luck: float = 0.0) -> None:
        super().__init__(None, luck)


class ShortWins(TugOfWar):
    """Player 0 wins every other game in 1 step and loses the others in 20, whatever they do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.fate = 1 if (seed or 0) % 2 else -1
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ended = self.time >= (1 if self.fate == 1 else 20)
        return self._seen(), 0.0, ended, False, {"winner": self.fate} if ended else {}


class WideTugOfWar(TugOfWar):
    """Its players see one more number."""

    def __init__(self, opponent: str | None = None) -> None:
        super().__init__(opponent)
        obs = spaces.Box(-4.0, 4.0, (3,), np.float32)
        self.observation_space = both_spaces(obs) if opponent is None else obs
