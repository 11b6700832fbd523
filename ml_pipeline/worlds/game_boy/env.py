"""GameBoy: a game in PyBoy; a YAML file names its memory, rewards and ends (docs/game_boy.md).

An action presses its buttons, holds them for ``press`` frames and releases them within the same
step. The emulator is deterministic: the same actions give the same episode. PyBoy never returns
from an opcode that does not exist, so games that can crash belong in workers, which have deadlines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, AnySpace, Info
from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict
from ml_pipeline.worlds.game_boy.emulator import Emulator, read_rom
from ml_pipeline.worlds.game_boy.rules import Address, read_rules

if TYPE_CHECKING:
    from pyboy.pyboy import PyBoyMemoryView

HEIGHT, WIDTH = 144, 160
OBSERVATIONS = ("screen", "memory", "both")
_FRAMES_PER_SECOND = 60
_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue


class GameBoy(AnyEnv):
    """``observation``: ``screen`` is [stack, height, width], the newest frame last.

    ``memory`` has each named number, scaled from its bounds to 0 and 1. ``both`` is a Dict of them.
    ``rom``, ``game`` and ``state`` are paths; without ``state``, episodes start after power-on.
    """

    is_deterministic = True  # the emulator, its clock and its start are

    def __init__(
        self,
        rom: str,
        game: str,
        state: str | None = None,
        observation: str = "screen",
        frame_skip: int = 24,
        press: int = 8,
        downscale: int = 2,
        stack: int = 3,
        episode_length: int = 1000,
        render_mode: str | None = None,
    ) -> None:
        _check(observation in OBSERVATIONS, "observation", observation, " | ".join(OBSERVATIONS))
        # A release after the last frame would be lost in a snapshot.
        _check(1 <= press < frame_skip, "press", press, f"1 to {frame_skip - 1} (frame_skip - 1)")
        fits = downscale >= 1 and HEIGHT % downscale == 0 and WIDTH % downscale == 0
        _check(fits, "downscale", downscale, "1, 2, 4, 8 or 16")
        _check(stack >= 1, "stack", stack, "at least 1")
        _check(episode_length >= 1, "episode_length", episode_length, "at least 1")
        _check(render_mode in (None, "rgb_array"), "render_mode", render_mode, "rgb_array or null")
        _check(bool(rom), "rom", rom, "the path of a ROM, env.kwargs.rom=game.gb")
        _check(bool(game), "game", game, "the path of a game file, env.kwargs.game=game.yaml")
        checked_rom = read_rom(Path(rom))
        self.rules = read_rules(Path(game), checked_rom.cartridge)
        self._emulator = Emulator(checked_rom, None if state is None else Path(state))
        self._is_color = checked_rom.cartridge.is_color
        self.frame_skip, self.press, self.downscale = frame_skip, press, downscale
        self.episode_length = episode_length
        self.render_mode = render_mode
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": _FRAMES_PER_SECOND / frame_skip,
        }
        self._sees_screen = observation in ("screen", "both")
        self._sees_memory = observation in ("memory", "both")
        self._draws = self._sees_screen or render_mode is not None
        shape = stack, HEIGHT // downscale, WIDTH // downscale
        self._frames: NDArray[np.uint8] = np.zeros(shape, dtype=np.uint8)
        bounds = [address.bounds for address in self.rules.addresses.values()]
        self._low = np.array([each.low for each in bounds], dtype=np.float64)
        self._range = np.array([each.high - each.low for each in bounds], dtype=np.float64)
        parts: dict[str, AnySpace] = {
            "screen": spaces.Box(0, 255, shape, np.uint8),
            "memory": spaces.Box(0.0, 1.0, (len(bounds),), np.float32),
        }
        self.observation_space = spaces.Dict(parts) if observation == "both" else parts[observation]
        self.action_space = spaces.Discrete(len(self.rules.actions))
        self._addresses = tuple(self.rules.addresses.values())
        self._values: list[int] | None = None  # of the addresses; None before the first reset
        self._n_steps = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._emulator.reset()
        self._values = self._read()
        self._n_steps = 0
        if self._sees_screen:
            self._frames[:] = self._grey()
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        if self._values is None:
            raise gym.error.ResetNeeded("GameBoy: call reset before step")
        buttons, pyboy = self.rules.actions[action], self._emulator.pyboy
        if buttons:
            for button in buttons:
                pyboy.button_press(button)
            pyboy.tick(self.press, False, False)
            for button in buttons:
                pyboy.button_release(button)
            pyboy.tick(self.frame_skip - self.press, self._draws, False)
        else:
            pyboy.tick(self.frame_skip, self._draws, False)
        self._n_steps += 1
        now = self._read()
        delta = [new - old for new, old in zip(now, self._values, strict=True)]
        self._values = now
        if self._sees_screen:
            self._frames[:-1] = self._frames[1:]
            self._frames[-1] = self._grey()
        reward = float(sum(term(now, delta) for term in self.rules.reward.values()))
        terminated = any(end(now, delta) for end in self.rules.end.values())
        truncated = not terminated and self._n_steps >= self.episode_length
        info: Info = {}
        if terminated or truncated:  # the run reports their means
            info = dict(zip(self.rules.addresses, now, strict=True))
        return self._observed(), reward, terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        screen: NDArray[np.uint8] = self._emulator.pyboy.screen.ndarray[:, :, :3].copy()
        return screen

    def close(self) -> None:
        self._emulator.stop()

    def get_state(self) -> StateDict:
        """Everything that decides the rest of the episode, for snapshots."""
        return {
            "emulator": self._emulator.save(),
            "frames": self._frames.copy(),
            "values": self._values,
            "n_steps": self._n_steps,
        }

    def set_state(self, state: StateDict) -> None:
        self._emulator.load(state["emulator"])
        self._frames[:] = state["frames"]
        self._values, self._n_steps = state["values"], state["n_steps"]

    def _read(self) -> list[int]:
        memory = self._emulator.pyboy.memory
        return [_read_value(memory, address) for address in self._addresses]

    def _observed(self) -> Any:
        parts: dict[str, NDArray[np.generic]] = {}
        if self._sees_screen:
            parts["screen"] = self._frames.copy()
        if self._sees_memory:
            parts["memory"] = ((np.array(self._values) - self._low) / self._range).astype(
                np.float32
            )
        return parts if len(parts) == 2 else next(iter(parts.values()))

    def _grey(self) -> NDArray[np.uint8]:
        """The screen in grey, [height, width], each pixel the mean of a square of the screen."""
        screen: NDArray[np.uint8] = self._emulator.pyboy.screen.ndarray
        size = self.downscale
        if self._is_color:
            grey: NDArray[np.uint8] = (screen[:, :, :3] @ _LUMINANCE).astype(np.uint8)
        else:  # PyBoy's palette is grey: the first of four bytes is enough
            grey = screen.view("<u4")[:, :, 0].astype(np.uint8)
        if size == 1:
            return grey
        # Sums of slices are several times faster than a mean over two axes.
        rows = grey[::size].astype(np.uint16)
        for offset in range(1, size):
            rows += grey[offset::size]
        sums = rows[:, ::size] + rows[:, 1::size]
        for offset in range(2, size):
            sums += rows[:, offset::size]
        sums //= size * size
        return sums.astype(np.uint8)


def _read_value(memory: PyBoyMemoryView, address: Address) -> int:
    value = address.read([memory[place] for place in address.places])
    low, high = address.bounds
    return int(low) if value < low else int(high) if value > high else value


def _check(fact: bool, key: str, value: object, rule: str) -> None:
    if not fact:
        raise GameBoyError(f"env.kwargs.{key}={value}: must be {rule}")


class GameBoyError(UserError):
    """An argument of GameBoy is wrong."""
