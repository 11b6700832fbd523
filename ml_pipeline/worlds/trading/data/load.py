"""load_market: a period of a market, from files or synthetic, normalised and cached on disk.

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
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.config import DataConfig, FilesConfig, SyntheticConfig
from ml_pipeline.worlds.trading.data.align import aligned
from ml_pipeline.worlds.trading.data.bars import Bars, bar_text, nanoseconds, text_of
from ml_pipeline.worlds.trading.data.cache import Entry, cached, default_folder, key_of
from ml_pipeline.worlds.trading.data.features import Feature, parsed
from ml_pipeline.worlds.trading.data.files import market_files, read_bars
from ml_pipeline.worlds.trading.data.layouts import FileFormat
from ml_pipeline.worlds.trading.data.market import DataError, Market
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars

Array = NDArray[np.float64]

PERIODS = ("train", "validation", "test", "all")

_KEY = "env.kwargs.data"  # where the group data/ puts its keys
_SHORTEST = 2  # rows of a period: an order fills in the next one
_CLIP = 10.0  # scales; one wild bar must not blind the network
_NORMAL_IQR = 1.3489795003921634  # distance of the quartiles of a standard normal


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


def load_market(*, period: str, **data: object) -> Market:
    """The market that the keys of conf/data/ describe; its arrays are read-only and shared."""
    if period not in PERIODS:
        raise DataError(f"env.kwargs.period={period}: must be {' | '.join(PERIODS)}")
    with _full_keys():
        market, facts = _entry(data)
        start, stop = facts["periods"][period]
        if stop - start == 0:
            raise DataError(f"{period}={data[period]}: the period {period} is empty")
    return market.rows(slice(start, stop))


def load_recipe(**data: object) -> Recipe:
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
    return raw._replace(feature=_normalised(raw.feature, recipe))


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


def _entry(data: Mapping[str, object]) -> Entry:
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
        centre, scale = _fitted(market, found["train"], config.normalise)
        recipe = Recipe(
            symbols=list(market.symbols),
            bar=bar,
            features=list(config.features),
            centre=centre.tolist(),
            scale=scale.tolist(),
            clip=None if config.normalise == "none" else _CLIP,
        )
        rows = {name: [each.start, each.stop] for name, each in found.items()}
        facts = {"periods": rows, "recipe": recipe._asdict()}
        return Entry(market._replace(feature=_normalised(market.feature, recipe)), facts)

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


def periods(
    time: NDArray[np.int64], *, validation: float | str, test: float | str, embargo: int
) -> dict[str, slice]:
    """The rows of each period.

    A share counts rows, the test period being the last ones. A date is the first day of a period
    in UTC: a bar that ends at its midnight belongs to the day before. ``embargo`` rows are dropped
    at the end of train and of validation.
    """
    n_rows = len(time)
    test_start = _start(time, test, n_rows, "test")
    validation_start = _start(time, validation, test_start, "validation")
    if validation_start > test_start:
        raise DataError(f"validation={validation}: must be before test={test}")
    train_end = validation_start - (embargo if validation_start < n_rows else 0)
    validation_end = test_start - (embargo if test_start < n_rows else 0)
    found = {
        "train": slice(0, max(train_end, 0)),
        "validation": slice(validation_start, max(validation_end, validation_start)),
        "test": slice(test_start, n_rows),
        "all": slice(0, n_rows),
    }
    is_wanted = {
        "train": True,
        "validation": validation_start < test_start,
        "test": test_start < n_rows,
    }
    for name, wanted in is_wanted.items():
        if wanted and found[name].stop - found[name].start < _SHORTEST:
            raise DataError(
                f"too short: {n_rows} rows from {text_of(int(time[0]))} to "
                f"{text_of(int(time[-1]))} leave no {name} period with validation={validation}, "
                f"test={test} and an embargo of {embargo} rows"
            )
    return found


def _start(time: NDArray[np.int64], value: float | str, end: int, name: str) -> int:
    """The first row of a period that is a share of all rows before ``end``, or starts at a date."""
    if not isinstance(value, str):
        return end - int(value * len(time))
    try:
        date = np.datetime64(value.replace(" ", "T"), "ns").astype(np.int64)
    except ValueError as error:
        raise DataError(f"{name}={value}: not a date such as 2024-01-31") from error
    return int(np.searchsorted(time, date, side="right"))


def _fitted(market: Market, train: slice, normalise: str) -> tuple[Array, Array]:
    """Centre and scale [S, F] of the bars of the train period; gaps do not count."""
    shape = market.feature.shape[1:]
    centre, scale = np.zeros(shape), np.ones(shape)
    if normalise == "none":
        return centre, scale
    for index, symbol in enumerate(market.symbols):
        seen = market.feature[train, index][market.tradable[train, index]]
        if len(seen) < 2:
            raise DataError(
                f"normalise={normalise}: {symbol} has no bars in the train period; "
                "leave it out, or move the periods"
            )
        if normalise == "robust":
            low, centre[index], high = np.quantile(seen, (0.25, 0.5, 0.75), axis=0)
            scale[index] = (high - low) / _NORMAL_IQR
        else:
            centre[index], scale[index] = seen.mean(axis=0), seen.std(axis=0)
    return centre, np.where(scale > 0, scale, 1.0)


def _normalised(feature: NDArray[np.floating], recipe: Recipe) -> NDArray[np.float32]:
    """float32 features; [T, S, F]."""
    scaled = np.subtract(feature, recipe.centre)
    scaled /= recipe.scale
    if recipe.clip is not None:
        np.clip(scaled, -recipe.clip, recipe.clip, out=scaled)
    return np.asarray(scaled, dtype=np.float32)
