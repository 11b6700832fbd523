"""The settings of market data, as conf/data/ chooses them; an error starts with the key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Optional, Union

from ml_pipeline.config.checks import check, integer_steps

MARKETS = ("random_walk", "edge", "regimes", "gaps")
NORMALISERS = ("standard", "robust", "none")
LABELS = ("start", "end")
COLUMNS = ("time", "open", "high", "low", "close", "volume", "spread", "symbol")
DEFAULT_FEATURES = (
    *("return_1", "return_6", "return_24", "rsi_14", "ema_50", "atr_14", "bollinger_20_2"),
    *("volatility_24", "volume_24", "time_of_day", "time_of_week"),
)


@dataclass
class DataConfig:
    """What files and synthetic markets share."""

    # docs/market_data.md describes them
    features: list[str] = field(default_factory=lambda: list(DEFAULT_FEATURES))
    normalise: str = "standard"  # standard | robust | none; fitted on the train period
    # Share of the rows, or the first date of the period: 2024-01-31
    validation: Union[float, str] = 0.15
    test: Union[float, str] = 0.15  # as validation; the last rows
    # Rows dropped before validation and before test; null: the longest warm-up of a feature
    embargo: Optional[int] = None
    cache_dir: Optional[str] = None  # null: ml_pipeline/markets in the user's cache folder

    def __post_init__(self) -> None:
        is_list = isinstance(self.features, (list, tuple)) and len(self.features) > 0
        self._check(is_list, "features", "a list with at least one feature")
        self._check_choice("normalise", NORMALISERS)
        for name in ("validation", "test"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_date = isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value) is not None
            rule = "a share below 1, or a date such as 2024-01-31"
            self._check(is_date or (is_number and 0 <= value < 1), name, rule)
        if self.embargo is not None:
            is_count = isinstance(self.embargo, int) and self.embargo >= 0
            self._check(is_count, "embargo", "null, or an integer of at least 0")

    def _check(self, fact: bool, name: str, rule: str) -> None:
        value = getattr(self, name)
        check(fact, name, rule, "null" if value is None else value)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(getattr(self, name) in choices, name, " | ".join(choices))


@dataclass
class SyntheticConfig(DataConfig):
    """A market without files: data=synthetic."""

    market: str = "edge"  # random_walk | edge | regimes | gaps
    n_symbols: float = 1
    n_bars: float = 20_000  # per symbol
    bar: str = "1h"  # length of a bar: 30s, 15m, 4h, 1d
    seed: int = 1
    # Of the market: +env.kwargs.data.parameters.correlation=0.1
    parameters: dict[str, float] = field(default_factory=dict)
    # docs/market_data.md describes them; column_signal predicts the next return in edge
    features: list[str] = field(default_factory=lambda: ["column_signal", *DEFAULT_FEATURES])

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("market", MARKETS)
        for name in ("n_symbols", "n_bars"):
            setattr(self, name, integer_steps(name, getattr(self, name)))
        is_seed = isinstance(self.seed, int) and self.seed >= 0
        self._check(is_seed, "seed", "an integer of at least 0")


@dataclass
class FilesConfig(DataConfig):
    """CSV and Parquet files: data=files."""

    path: Optional[str] = None  # required: a file, a folder or a pattern such as prices/*.csv
    # Of times without a zone, such as Europe/Athens; null: UTC, and MT5 files are refused
    timezone: Optional[str] = None
    # start | end: the time of a bar in a plain table; other layouts have starts
    label: str = "start"
    # Names in the header of a table, if they are other ones: {time: Timestamp, close: Last}
    columns: Optional[dict[str, str]] = None
    symbols: Optional[list[str]] = None  # null: all
    bar: Optional[str] = None  # resample to longer bars, such as 1h; null: as in the files

    def __post_init__(self) -> None:
        super().__post_init__()
        is_path = isinstance(self.path, str) and bool(self.path)
        self._check(is_path, "path", "a file, a folder or a pattern such as prices/*.csv")
        self._check_choice("label", LABELS)
        named = self.columns or {}
        is_map = isinstance(named, dict) and all(isinstance(each, str) for each in named.values())
        rule = f"NAME of the file for any of {', '.join(COLUMNS)}, as {{time: NAME}}"
        self._check(is_map and set(named) <= set(COLUMNS), "columns", rule)
        is_list = isinstance(self.symbols, (list, tuple)) and len(self.symbols) > 0
        self._check(self.symbols is None or is_list, "symbols", "null, or a list")
