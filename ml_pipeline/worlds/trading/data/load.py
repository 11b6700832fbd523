"""load_market: a period of a market, from files or synthetic, cached on disk.

A ``Recipe`` holds what turns new bars of the same symbols into the same features: the paper command
stores it with a policy and applies ``new_market`` to a growing file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ml_pipeline.worlds.trading.config import DataConfig, FilesConfig, SyntheticConfig
from ml_pipeline.worlds.trading.data.align import aligned
from ml_pipeline.worlds.trading.data.bars import Bars, bar_text, nanoseconds
from ml_pipeline.worlds.trading.data.cache import Entry, cached, default_folder, key_of
from ml_pipeline.worlds.trading.data.features import Feature, parsed
from ml_pipeline.worlds.trading.data.files import market_files, read_bars
from ml_pipeline.worlds.trading.data.layouts import FileFormat
from ml_pipeline.worlds.trading.data.market import DataError, Market
from ml_pipeline.worlds.trading.data.normalise import Statistics, fitted, normalised
from ml_pipeline.worlds.trading.data.split import PERIODS, periods
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars

_KEY = "env.kwargs.data"  # where the group data/ puts its keys


class Recipe(NamedTuple):
    """How the features of a market were made; plain values, for JSON."""

    symbols: list[str]
    bar: str
    features: list[str]
    centre: list[list[float]]  # [S][F]
    scale: list[list[float]]
    clip: float | None  # in scales

    @property
    def n_bars(self) -> int:
        """Bars of a symbol that suffice for its newest row, to the precision of float32."""
        return max(feature.memory for feature in self.parsed)

    @property
    def parsed(self) -> list[Feature]:
        return [parsed(text) for text in self.features]

    @property
    def columns(self) -> list[str]:
        """The further columns that a file must have."""
        return _columns(self.parsed)


def load_market(*, period: str, **data: Any) -> Market:
    """The market that the keys of conf/data/ describe; its arrays are read-only and shared."""
    if period not in PERIODS:
        raise DataError(f"env.kwargs.period={period}: must be {' | '.join(PERIODS)}")
    with _full_keys():
        market, facts = _entry(data)
        start, stop = facts["periods"][period]
        if stop - start == 0:
            raise DataError(f"{period}={data[period]}: the period {period} is empty")
    return market.rows(slice(start, stop))


def load_recipe(**data: Any) -> Recipe:
    """The recipe of the same market."""
    with _full_keys():
        return Recipe(**_entry(data).facts["recipe"])


@contextmanager
def _full_keys() -> Iterator[None]:
    """Let an error that starts with a key of the group name its place in the config."""
    try:
        yield
    except DataError as error:
        keys = [each.name for kind in (SyntheticConfig, FilesConfig) for each in fields(kind)]
        if re.match(rf"({'|'.join(keys)})(\.\w+)?=", str(error)):
            raise DataError(f"{_KEY}.{error}") from error
        raise


def new_market(bars: Mapping[str, Bars], recipe: Recipe) -> Market:
    """The market of other bars of the same symbols: all rows after the warm-up.

    With the last ``recipe.n_bars`` bars of each symbol, or more, the last row is that of
    ``load_market``; with all bars since the first one, every row is the same bit for bit.
    """
    raw = aligned({symbol: bars[symbol] for symbol in recipe.symbols}, recipe.parsed)
    clip = np.inf if recipe.clip is None else recipe.clip
    statistics = Statistics(np.array(recipe.centre), np.array(recipe.scale), clip)
    return raw._replace(feature=normalised(raw.feature, statistics))


def read_new_bars(path: str, recipe: Recipe, **files: Any) -> dict[str, Bars]:
    """The bars of files that may still grow; ``files`` are the fields of a ``FileFormat``."""
    return read_bars(
        market_files(path),
        FileFormat(**files),
        symbols=recipe.symbols,
        further=recipe.columns,
        length=nanoseconds(recipe.bar),
        is_growing=True,
    )[0]


def _entry(data: Mapping[str, Any]) -> Entry:
    config = _config(data)
    features = [parsed(text) for text in config.features]
    embargo = _embargo(config, features)
    folder = default_folder() if config.cache_dir is None else Path(config.cache_dir)
    settings = {**asdict(config), "cache_dir": None}
    files = market_files(str(config.path)) if isinstance(config, FilesConfig) else []

    def build() -> Entry:
        bars, bar = _bars(config, files, features)
        market = aligned(bars, features)
        found = periods(
            market.time, validation=config.validation, test=config.test, embargo=embargo
        )
        statistics = fitted(market, found["train"], config.normalise)
        recipe = Recipe(
            symbols=list(market.symbols),
            bar=bar,
            features=list(config.features),
            centre=statistics.centre.tolist(),
            scale=statistics.scale.tolist(),
            clip=None if np.isinf(statistics.clip) else statistics.clip,
        )
        rows = {name: [each.start, each.stop] for name, each in found.items()}
        feature = normalised(market.feature, statistics)
        facts = {"periods": rows, "recipe": recipe._asdict()}
        return Entry(market._replace(feature=feature), facts)

    return cached(folder, key_of(settings, files, folder), build)


def _config(data: Mapping[str, Any]) -> DataConfig:
    kind: type[DataConfig] = FilesConfig if "path" in data else SyntheticConfig
    known = [each.name for each in fields(kind)]
    for name in data:
        if name not in known:
            raise DataError(f"{_KEY}.{name} is unknown; choose from {', '.join(sorted(known))}")
    try:
        return kind(**data)
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from error


def _embargo(config: DataConfig, features: list[Feature]) -> int:
    longest = max(features, key=lambda feature: feature.warmup)
    if config.embargo is None:
        return longest.warmup
    if config.embargo < longest.warmup:
        raise DataError(
            f"embargo={config.embargo}: {longest.columns[0]} looks back {longest.warmup} "
            "bars; use at least as many, or null"
        )
    return config.embargo


def _bars(
    config: DataConfig, files: list[Path], features: list[Feature]
) -> tuple[dict[str, Bars], str]:
    columns = _columns(features)
    if isinstance(config, FilesConfig):
        bars, length = read_bars(
            files,
            FileFormat(config.timezone, config.label, config.columns or {}),
            symbols=config.symbols,
            further=columns,
            length=None if config.bar is None else nanoseconds(config.bar),
        )
        return bars, bar_text(length)
    assert isinstance(config, SyntheticConfig)
    for name in columns:
        if name != "signal":
            raise DataError(f"features=column_{name}: synthetic markets have only signal")
    bars = synthetic_bars(
        config.market,
        n_symbols=int(config.n_symbols),
        n_bars=int(config.n_bars),
        bar=config.bar,
        seed=config.seed,
        parameters=config.parameters,
    )
    return bars, config.bar


def _columns(features: list[Feature]) -> list[str]:
    return list(dict.fromkeys(each.reads for each in features if each.reads is not None))
