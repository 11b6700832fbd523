"""Trading envs with a small market of their own, for runs that a config describes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from trading_markets import random_market

from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.tensor_env import TorchTrading

MARKET = random_market(300, volatility=0.004)


class SmallTrading(Trading):
    def __init__(self, **settings: Any) -> None:
        super().__init__(market=MARKET, **settings)


class SmallTorchTrading(TorchTrading):
    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, market=MARKET, **settings)

    @classmethod
    def single_env(cls, **kwargs: Any) -> gym.Env[Any, Any]:
        return SmallTrading(**kwargs)
