"""load_market: periods, normalisation, the cache, recipes for new bars, and its errors."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, call
from market_rows import HOUR, random_bars, write_table

from ml_pipeline.assembly.compose import ConfigError, compose_config
from ml_pipeline.worlds.trading.config import MARKETS, FilesConfig, SyntheticConfig
from ml_pipeline.worlds.trading.data.load import (
    Recipe,
    load_market,
    load_recipe,
    new_market,
    read_new_bars,
)
from ml_pipeline.worlds.trading.data.market import DataError, Market

ARRAYS = Market._fields[2:]


@pytest.fixture
def synthetic(tmp_path: Path) -> dict[str, Any]:
    return {"market": "edge", "n_bars": 600, "cache_dir": str(tmp_path / "cache")}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Two symbols; B misses some bars."""
    folder = tmp_path / "prices"
    folder.mkdir()
    write_table(folder / "A.csv", random_bars(800, seed=1))
    keep = np.flatnonzero(np.random.default_rng(0).random(800) > 0.1)
    write_table(folder / "B.csv", random_bars(800, seed=2).rows(keep))
    return {"path": str(folder), "label": "end", "cache_dir": str(tmp_path / "cache")}


def equal(one: Market, other: Market) -> bool:
    names = zip(one[:2], other[:2], strict=True)
    return all(a == b for a, b in names) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS
    )


def entry_of(settings: dict[str, Any]) -> Path:
    (folder,) = [path for path in Path(settings["cache_dir"]).iterdir() if path.is_dir()]
    return folder


@pytest.mark.parametrize("market", MARKETS)
def test_default_settings_give_a_complete_market(tmp_path: Path, market: str) -> None:
    cache = str(tmp_path)

    loaded = load_market(period="all", market=market, n_bars=900, n_symbols=2, cache_dir=cache)

    n_rows, n_features = len(loaded.time), len(loaded.features)
    assert loaded.symbols == ("SYN0", "SYN1")
    assert (n_rows > 500, n_features) == (True, 15)
    assert loaded.feature.shape == (n_rows, 2, n_features)
    assert loaded.feature.dtype == np.float32
    assert np.isfinite(loaded.feature).all()
    assert (np.diff(loaded.time) > 0).all()
    for name in ("open", "high", "low", "close", "volume", "spread", "tradable"):
        assert getattr(loaded, name).shape == (n_rows, 2)


def test_periods_follow_each_other_with_the_longest_warmup_between_them(
    synthetic: dict[str, Any],
) -> None:
    periods = [load_market(period=each, **synthetic) for each in ("train", "validation", "test")]
    whole = load_market(period="all", **synthetic)

    train, validation, test = periods
    assert validation.time[0] - train.time[-1] == (49 + 1) * HOUR  # ema_50 has the longest one
    assert test.time[0] - validation.time[-1] == (49 + 1) * HOUR
    assert (train.time[0], test.time[-1]) == (whole.time[0], whole.time[-1])
    assert len(whole.time) == 600 - 49
    assert [len(validation.time), len(test.time)] == [82 - 49, 82]


def test_standard_features_have_mean_0_and_deviation_1_in_train_only(
    synthetic: dict[str, Any],
) -> None:
    settings = {**synthetic, "features": ["return_1", "rsi_14", "column_signal"]}
    train = load_market(period="train", **settings)
    test = load_market(period="test", **settings)

    assert np.allclose(train.feature.mean(axis=0), 0.0, atol=1e-6)
    assert np.allclose(train.feature.std(axis=0), 1.0, atol=1e-6)
    assert not np.allclose(test.feature.std(axis=0), 1.0, atol=1e-3)


@pytest.mark.parametrize("normalise", ["standard", "robust"])
def test_statistics_count_bars_and_no_gaps(files: dict[str, Any], normalise: str) -> None:
    settings = {**files, "features": ["column_signal"], "normalise": normalise}
    train = load_market(period="train", **settings)
    raw = load_market(period="train", **{**settings, "normalise": "none"})
    recipe = load_recipe(**settings)

    seen = raw.feature[raw.tradable[:, 1], 1, 0]

    assert len(seen) < len(train.time)
    centre = seen.mean() if normalise == "standard" else np.median(seen)
    assert np.isclose(recipe.centre[1][0], centre, rtol=1e-5)


def test_robust_features_have_median_0_and_quartiles_of_a_normal(synthetic: dict[str, Any]) -> None:
    train = load_market(period="train", **synthetic, normalise="robust", features=["return_1"])

    low, middle, high = np.quantile(train.feature[:, 0, 0], (0.25, 0.5, 0.75))

    assert abs(middle) < 1e-6
    assert abs(high - low - 1.349) < 1e-3


def test_features_without_normalisation_are_those_of_the_bars(files: dict[str, Any]) -> None:
    settings = {**files, "normalise": "none", "features": ["return_1"], "symbols": ["A"]}

    market = load_market(period="all", **settings)

    close = random_bars(800, seed=1).close
    expected = np.log(close[1:] / close[:-1]).astype(np.float32)
    assert np.array_equal(market.feature[:, 0, 0], expected)


def test_second_load_shares_the_mapping_which_cannot_be_written(files: dict[str, Any]) -> None:
    first, second, whole = (load_market(period=each, **files) for each in ("train", "train", "all"))

    assert equal(first, second)
    assert all(np.shares_memory(getattr(first, name), getattr(whole, name)) for name in ARRAYS)
    with pytest.raises(ValueError, match="read-only"):
        second.close[0, 0] = 1.0


def _flip_a_byte(entry: Path) -> None:
    content = bytearray((entry / "close.npy").read_bytes())
    content[-3] ^= 1
    (entry / "close.npy").write_bytes(content)


def _truncate(entry: Path) -> None:
    with (entry / "feature.npy").open("r+b") as file:
        file.truncate(500)


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        (entry / name).unlink()
        make(entry / name)

    return damage


def _link_out(path: Path) -> None:
    outside = path.parents[2] / "outside"
    outside.write_bytes(b"x")
    path.symlink_to(outside)


def _make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**43)  # of holes, without room on the disk


DAMAGES = {
    "byte": _flip_a_byte,
    "truncated": _truncate,
    "missing array": lambda entry: (entry / "time.npy").unlink(),
    "empty manifest": lambda entry: (entry / "manifest.json").write_text(""),
    "other manifest": lambda entry: (entry / "manifest.json").write_text("[]"),
}

if os.name == "posix":  # Windows has no FIFOs and devices
    DAMAGES |= {
        f"{kind} {name}": _replace(name, make)
        for name in ("manifest.json", "close.npy")
        for kind, make in {
            "fifo": os.mkfifo,
            "zero": lambda path: path.symlink_to("/dev/zero"),
            "link": _link_out,
            "huge": _make_huge,
        }.items()
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_found_and_rebuilt(files: dict[str, Any], damage: str) -> None:
    before = load_market(period="all", **files)
    copy = before._replace(**{name: getattr(before, name).copy() for name in ARRAYS})
    del before
    DAMAGES[damage](entry_of(files))

    after = load_market(period="all", **files)

    assert equal(copy, after)
    assert len(list(entry_of(files).iterdir())) == len(ARRAYS) + 1


def test_changed_source_gives_other_arrays(files: dict[str, Any]) -> None:
    before = load_market(period="all", **files)
    write_table(Path(files["path"]) / "A.csv", random_bars(800, seed=5))

    after = load_market(period="all", **files)

    assert not np.array_equal(before.close[:, 0], after.close[:, 0])
    assert np.array_equal(after.close[:, 0], random_bars(800, seed=5).close[-len(after.time) :])


def _digest(settings: dict[str, Any]) -> float:
    return float(load_market(period="all", **settings).feature.sum())


@pytest.mark.slow
def test_processes_that_start_together_build_one_entry(files: dict[str, Any]) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        sums = pool.map(_digest, [files] * 8)

    assert len(set(sums)) == 1
    names = [path.name for path in Path(files["cache_dir"]).iterdir()]
    assert len([name for name in names if not name.endswith((".lock", ".source"))]) == 1


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DataError, match=r"cache_dir=.*cannot be written"):
        load_market(period="all", n_bars=300, cache_dir=str(tmp_path / "file" / "cache"))


def test_recipe_gives_new_bars_the_features_of_the_market(files: dict[str, Any]) -> None:
    market = load_market(period="all", **files)
    recipe = Recipe(**json.loads(json.dumps(load_recipe(**files)._asdict())))
    bars = read_new_bars(files["path"], recipe, label="end")

    again = new_market(bars, recipe)

    assert equal(market, again)


def test_named_columns_give_the_same_market(tmp_path: Path, files: dict[str, Any]) -> None:
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for path in Path(files["path"]).glob("*.csv"):
        text = path.read_text().replace("time", "when", 1).replace("close", "last", 1)
        (renamed / path.name).write_text(text)
    named = {**files, "path": str(renamed), "columns": {"time": "When", "close": "last"}}

    assert equal(load_market(period="all", **files), load_market(period="all", **named))
    with pytest.raises(DataError, match=r"lacks time, close; .*columns={time: NAME, close: NAME}"):
        load_market(period="all", **{**named, "columns": None})
    with pytest.raises(DataError, match=r"env\.kwargs\.data\.columns=.*must be NAME of the file"):
        load_market(period="all", **{**named, "columns": {"when": "time"}})


def test_tail_of_the_bars_suffices_for_the_newest_row(files: dict[str, Any]) -> None:
    files = {**files, "features": ["rsi_14", "ema_10", "atr_14", "bollinger_20_2", "time_of_day"]}
    market = load_market(period="all", **files)
    recipe = load_recipe(**files)
    bars = read_new_bars(files["path"], recipe, label="end")
    assert recipe.n_bars < 400

    tail = new_market(
        {name: each.rows(slice(-recipe.n_bars, None)) for name, each in bars.items()}, recipe
    )

    np.testing.assert_allclose(tail.feature[-1], market.feature[-1], rtol=1e-6, atol=1e-6)
    assert tail.close[-1].tolist() == market.close[-1].tolist()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"period": "future"}, "env.kwargs.period=future: must be train | validation | test | all"),
        ({"market": "moon"}, "env.kwargs.data.market=moon: must be random_walk | edge"),
        ({"marekt": "edge"}, "env.kwargs.data.marekt is unknown; choose from bar, cache_dir"),
        ({"embargo": 10}, "env.kwargs.data.embargo=10: ema_50 looks back 49 bars; use at least"),
        ({"normalise": "minmax"}, "env.kwargs.data.normalise=minmax: must be standard | robust"),
        ({"features": []}, "env.kwargs.data.features=[]: must be a list with at least one"),
        ({"features": ["column_x"]}, "column_x: synthetic markets have only signal"),
        ({"bar": "1 hour"}, "env.kwargs.data.bar=1 hour: must be a number and s, m, h or d"),
        ({"validation": 1.5}, "env.kwargs.data.validation=1.5: must be a share below 1"),
        ({"n_bars": 80}, "leave no train period"),
        ({"n_bars": 30}, "too short: SYN0 has 30 bars, the features need 50"),
        ({"n_bars": "many"}, "env.kwargs.data.n_bars=many: must be an integer of at least 1"),
        ({"path": "x.csv"}, "env.kwargs.data.n_bars is unknown; choose from bar, cache_dir"),
        (
            {"validation": 0, "period": "validation"},
            "env.kwargs.data.validation=0: the period validation is empty",
        ),
        (
            {"parameters": {"correlation": 1.0}},
            "env.kwargs.data.parameters.correlation=1.0: must be between -0.99 and 0.99",
        ),
        (
            {"market": "random_walk", "parameters": {"correlation": 0.1}},
            "parameters.correlation=0.1: unknown; market=random_walk has volatility",
        ),
        ({"parameters": {"correlation": "high"}}, "correlation=high: must be between"),
        ({"features": ["macd"]}, "env.kwargs.data.features=macd: unknown"),
    ],
)
def test_wrong_setting_is_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_market(**{"period": "train", "n_bars": 600, "cache_dir": str(tmp_path), **settings})

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_group_without_a_path_is_refused() -> None:
    with pytest.raises(DataError, match=r"env\.kwargs\.data\.path=null: must be a file, a folder"):
        load_market(period="train", path=None)


def test_error_of_a_file_setting_has_the_full_key(files: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^env\.kwargs\.data\.symbols=C: not in the files"):
        load_market(period="all", **{**files, "symbols": ["C"]})


def test_missing_pyarrow_is_named_with_its_command_and_synthetic_works_without(
    files: dict[str, Any], synthetic: dict[str, Any]
) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from ml_pipeline.worlds.trading.data.load import load_market\n"
        "from ml_pipeline.errors import UserError\n"
        f"print(len(load_market(period='all', **{synthetic!r}).time))\n"
        "try:\n"
        f"    load_market(period='all', **{files!r})\n"
        "except UserError as error:\n"
        "    print(error)\n"
        "print([name for name in ('torch', 'pandas', 'hydra') if name in sys.modules])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    n_rows, error, heavy = result.stdout.splitlines()
    assert (n_rows, heavy) == ("551", "[]")
    assert error.startswith("market data needs pyarrow, which is not installed: pip install")
    assert "ml_pipeline[trading]" in error


@pytest.mark.parametrize(("name", "kind"), [("synthetic", SyntheticConfig), ("files", FilesConfig)])
def test_group_has_every_key_and_default_of_its_class(name: str, kind: type[Any]) -> None:
    composed = compose_config([f"data={name}"]).env.kwargs.data

    defaults = dataclasses.asdict(kind(path="prices/") if kind is FilesConfig else kind())

    assert composed == {**defaults, **({"path": None} if kind is FilesConfig else {})}


def test_group_fills_the_arguments_of_the_env() -> None:
    cfg = compose_config(["data=files", "env.kwargs.data.path=prices/", "env.kwargs.data.bar=4h"])
    plain = compose_config([])

    assert (cfg.env.kwargs.data.path, cfg.env.kwargs.data.bar) == ("prices/", "4h")
    assert dict(plain.env.kwargs) == {}


def test_wrong_key_of_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs\.data\.paht"):
        compose_config(["data=files", "env.kwargs.data.paht=prices/"])


def test_scripts_of_the_page_run(here: Path, files: dict[str, Any]) -> None:
    page = (REPOSITORY / "docs" / "market_data.md").read_text()
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)):
        (here / f"script_{index}.py").write_text(code)

    results = [
        call(
            *(sys.executable, f"script_{index}.py"),
            cwd=here,
            PYTHONPATH=str(REPOSITORY),
            XDG_CACHE_HOME=str(here / "user_cache"),
        )
        for index in range(2)
    ]

    assert [(each.returncode, each.stderr) for each in results] == [(0, "")] * 2
    assert results[0].stdout == "('SYN0',) (14000, 1) (14000, 1, 2)\n"
    assert len(list((here / "user_cache" / "ml_pipeline" / "markets").glob("*/manifest.json"))) == 2
