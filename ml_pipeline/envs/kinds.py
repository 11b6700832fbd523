"""Gymnasium's generic classes for envs whose observations and actions may be of any type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

AnyEnv = gym.Env[Any, Any]
AnyVectorEnv = VectorEnv[Any, Any, Any]
AnyWrapper = gym.Wrapper[Any, Any, Any, Any]
AnySpace = gym.Space[Any]
Info = dict[str, Any]
MakeEnv = Callable[[], AnyEnv]
