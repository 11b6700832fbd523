"""The report of a comparison: numbers of the charts, its files, and the page in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ml_pipeline.analysis.charts import make_charts
from ml_pipeline.analysis.compare import Group, RunData
from ml_pipeline.analysis.report import write_report
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.run_folder import RunFolder

CHARTS = ["curves", "curves_by_time", "final", "improvement", "profile", "efficiency", "throughput"]


def run_of(returns: list[float], seed: int, seconds: float = 0.5) -> RunData:
    rows = [
        {
            "env_steps": str(100 * (i + 1)),
            EVAL_RETURN: str(each),
            "time/iteration_seconds": str(seconds),
        }
        for i, each in enumerate(returns)
    ]
    config = {"env.id": "CartPole-v1", "env.target": None, "seed": seed}
    return RunData(RunFolder(Path(f"runs/CartPole-v1/run{seed}")), config, {}, rows)


def group_of(label: str, ends: list[float]) -> Group:
    return Group(label, [run_of([0.0, end / 2, end], seed) for seed, end in enumerate(ends)])


GROUPS = [
    group_of("a<b>=1", [10.0, 20.0, 30.0, 40.0, 50.0]),
    group_of("a<b>=2", [60.0, 70.0, 80.0, 90.0, 100.0]),
]


def chart(name: str, groups: list[Group] | None = None) -> Any:
    (found,) = [each for each in make_charts(groups or GROUPS, EVAL_RETURN) if each.name == name]
    return found


def test_curves_are_interquartile_means_over_the_range_of_all_runs() -> None:
    short = Group("x", [run_of([1.0, 2.0, 3.0], 1), run_of([3.0, 4.0], 2)])

    (line,) = chart("curves", [short]).lines

    assert (line.x[0], line.x[-1]) == (100, 200)
    assert (line.y[0], line.y[-1]) == (2.0, 3.0)
    (by_time,) = chart("curves_by_time", [short]).lines
    assert (by_time.x[0], by_time.x[-1]) == (0.5, 1.0)


def test_bars_show_the_final_value_and_each_run() -> None:
    first, second = chart("final").bars

    assert first.value == 30.0  # of the middle three
    assert first.low <= 30.0 <= first.high
    assert second.points.tolist() == [60.0, 70.0, 80.0, 90.0, 100.0]


def test_improvement_compares_the_first_group_to_the_second() -> None:
    (bar,) = chart("improvement").bars

    assert (bar.label, bar.value, bar.high) == ("a<b>=1 over a<b>=2", 0.0, 0.0)


def test_mean_steps_to_target_needs_all_runs_to_reach_it() -> None:
    # From 0 to the best group's 80: the target is 72, which no run of the first group reaches.
    first, second = chart("efficiency").bars

    assert first.label == "a<b>=1 (0 of 5)"
    assert np.isnan(first.value)
    assert second.label == "a<b>=2 (3 of 5)"
    assert second.points.tolist() == [300.0] * 3


def test_throughput_is_env_steps_per_second() -> None:
    assert [bar.value for bar in chart("throughput").bars] == [200.0, 200.0]


def test_single_run_gives_a_report(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report", [Group("all runs", [run_of([1.0], 1)])], EVAL_RETURN)

    assert "one run: an interval needs at least two" in page.read_text()


def test_report_is_one_page_and_a_png_per_chart(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report", GROUPS, EVAL_RETURN)

    text = page.read_text()
    assert sorted(path.stem for path in page.parent.glob("*.png")) == sorted(CHARTS)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in page.parent.glob("*.png"))
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)  # loads nothing
    assert "a&lt;b&gt;=1 is worse than a&lt;b&gt;=2" in text
    assert "run3" in text
    assert "10 runs in 2 groups" in text


@pytest.fixture
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = driver.chromium.launch(executable_path=path, args=options)
        yield chromium
        chromium.close()


@pytest.mark.slow
def test_charts_in_a_browser_are_interactive_and_load_nothing(browser: Any, tmp_path: Path) -> None:
    address = write_report(tmp_path / "report", GROUPS, EVAL_RETURN).as_uri()
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    page.goto(address)
    page.wait_for_selector("#throughput .main-svg")

    assert [page.locator(f"#{name} .main-svg").count() > 0 for name in CHARTS] == [True] * 7
    assert page.inner_text("h1") == "CartPole-v1"
    box = page.locator("#curves .nsewdrag").bounding_box()
    assert box["x"] + box["width"] < 600  # within its column
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 30)
    page.wait_for_selector("#curves .hoverlayer .hovertext")
    visible = "() => document.querySelector('#curves').data.map(trace => trace.visible ?? true)"
    assert page.evaluate(visible) == [True] * 6
    page.locator("#curves .legendtoggle").first.click()
    page.wait_for_function(
        "() => document.querySelector('#curves').data.some(t => t.visible === 'legendonly')"
    )
    assert page.evaluate(visible)[:3] == ["legendonly"] * 3  # the band and its line
    assert requested == [address]
    assert errors == []
