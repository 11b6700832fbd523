"""The report of a comparison: numbers of the charts, its files, and the page in a browser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from test_compare import run_data

from ml_pipeline.analysis.charts import make_charts
from ml_pipeline.analysis.compare import Group
from ml_pipeline.analysis.page import Figures
from ml_pipeline.analysis.paper_files import latex_table, write_paper_files
from ml_pipeline.analysis.report import write_report
from ml_pipeline.analysis.run_data import RunData
from ml_pipeline.metrics import EVAL_RETURN, PHASE
from ml_pipeline.runs.loggers import Column

CHARTS = ["curves", "curves_by_time", "final", "improvement", "profile", "efficiency", "throughput"]


def run_of(returns: list[float], seed: int) -> RunData:
    config = {"env.id": "CartPole-v1", "env.target": None, "seed": seed}
    return run_data(config, returns, name=f"run{seed}")


def group_of(name: str, value: str, ends: list[float]) -> Group:
    runs = [[run_of([0.0, end / 2, end], seed)] for seed, end in enumerate(ends)]
    return Group(name, {"a<b>": value}, runs, [])


GROUPS = [
    group_of("two", "2", [60.0, 70.0, 80.0, 90.0, 100.0]),
    group_of("one", "1", [10.0, 20.0, 30.0, 40.0, 50.0]),
]


def chart(name: str, groups: list[Group] | None = None) -> Any:
    (found,) = [each for each in make_charts(groups or GROUPS, EVAL_RETURN) if each.name == name]
    return found


def test_curves_are_interquartile_means_over_the_range_of_all_runs() -> None:
    short = Group("A", {}, [[run_of([1.0, 2.0, 3.0], 1)], [run_of([3.0, 4.0], 2)]], [])

    (line,) = chart("curves", [short]).lines

    assert (line.x[0], line.x[-1]) == (100, 200)
    assert (line.y[0], line.y[-1]) == (2.0, 3.0)
    (by_time,) = chart("curves_by_time", [short]).lines
    assert (by_time.x[0], by_time.x[-1]) == (0.5, 1.0)


def in_phases(run: RunData, phases: list[int]) -> RunData:
    return with_columns(run, {**run.metrics.read, PHASE: at(phases)})


def at(values: Sequence[float]) -> Column:
    """A column that every row has."""
    return Column(np.array(values, dtype=np.float64), np.ones(len(values), dtype=bool))


def with_columns(run: RunData, columns: dict[str, Column]) -> RunData:
    return run._replace(metrics=run.metrics._replace(read=columns))


def test_curves_are_marked_where_a_phase_starts() -> None:
    phases = [[1, 2, 2, 2], [1, 1, 1, 2], [1, 1, 2, 3]]
    runs = [in_phases(run_of([1.0] * 4, seed), each) for seed, each in enumerate(phases)]
    group = Group("A", {}, [[run] for run in runs], [])

    curves = chart("curves", [group])

    # Phase 2 starts after 100, 300 and 200 steps; one run reaches phase 3, after 300 steps.
    assert [mark.x for mark in curves.marks] == [200.0, 300.0]
    assert curves.note.endswith(" Dotted: a phase of the curriculum starts.")
    assert chart("curves").marks == []
    assert Figures([curves]).html().count('"dash":"dot"') == 2


def test_bars_show_the_final_value_and_each_seed() -> None:
    first, second = chart("final").bars

    assert first.points.tolist() == [60.0, 70.0, 80.0, 90.0, 100.0]
    assert second.value == 30.0  # of the middle three
    assert second.low <= 30.0 <= second.high


def test_improvement_compares_the_first_group_to_the_others() -> None:
    improvement = chart("improvement")

    (bar,) = improvement.bars
    assert (bar.label, bar.value, bar.high) == ("one", 1.0, 1.0)
    assert improvement.x_title == "two is better with probability"


def test_mean_steps_to_target_needs_all_runs_to_reach_it() -> None:
    # From 0 to the best group's 80: the target is 72, which no run of the second group reaches.
    efficiency = chart("efficiency")

    (bar,) = efficiency.bars
    assert bar.label == "two (3 of 5)"
    assert np.isnan(bar.value)
    assert bar.points.tolist() == [300.0] * 3
    assert efficiency.note.endswith(" Not drawn: one (no run reaches the value).")


def test_throughput_is_env_steps_per_second() -> None:
    assert [bar.value for bar in chart("throughput").bars] == [200.0, 200.0]


@pytest.mark.parametrize(
    ("env", "heading"),
    [({"env.target": "my.module.Mine"}, "Mine"), ({"env.id": "ALE/Pong-v5"}, "ALE/Pong-v5")],
)
def test_heading_of_a_report_is_the_env_without_its_module(
    env: dict[str, object], heading: str, tmp_path: Path
) -> None:
    run = run_of([1.0], 1)._replace(config={"seed": 1, **env})

    path = write_report(tmp_path, [Group("A", {}, [[run]], [])], EVAL_RETURN)

    assert f"<h1>{heading}</h1>" in path.read_text()


def test_single_run_gives_a_report(tmp_path: Path) -> None:
    group = Group("A", {}, [[run_of([1.0], 1)]], [])
    page = write_report(tmp_path / "report", [group], EVAL_RETURN)

    assert "one seed: an interval needs at least two" in page.read_text()


def many_groups(n_groups: int) -> list[Group]:
    return [
        group_of(f"G{rank}", f"a_long_value_of_the_group_{rank}", [100.0 - rank] * 5)
        for rank in range(n_groups)
    ]


def test_charts_call_groups_by_their_names() -> None:
    for each in make_charts(GROUPS, EVAL_RETURN):
        labels = {part.label.partition(" (")[0] for part in (*each.lines, *each.bars)}
        assert labels <= {"two", "one"}
        assert labels


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_twenty_groups_are_drawn_without_warnings(tmp_path: Path) -> None:
    groups = many_groups(20)

    text = write_report(tmp_path, groups, EVAL_RETURN).read_text()

    assert "a_long_value_of_the_group_19" in text
    assert "the charts show the 10 best of 20 groups" in text
    shown = [f"G{rank}" for rank in range(10)]
    assert [bar.label for bar in chart("final", groups).bars] == shown
    assert [bar.label for bar in chart("improvement", groups).bars] == shown[1:]


def test_curve_of_one_evaluation_is_a_point() -> None:
    group = Group("A", {}, [[run_of([1.0], 1)], [run_of([3.0], 2)]], [])

    curves = chart("curves", [group])

    (line,) = curves.lines
    assert (line.x.tolist(), line.y.tolist()) == ([100.0], [2.0])
    assert '"mode":"markers"' in Figures([curves]).html()


def test_empty_chart_says_why_and_has_no_png(tmp_path: Path) -> None:
    apart = [
        with_columns(run_of([1.0], seed), {"env_steps": at([steps]), EVAL_RETURN: at([1.0])})
        for seed, steps in ((1, 100.0), (2, 200.0))
    ]
    group = Group("A", {}, [[run] for run in apart], [])

    page = write_report(tmp_path, [group], EVAL_RETURN)

    reason = f"no {EVAL_RETURN} over a range of steps that its runs share"
    assert f"<h3>Learning curves</h3><p class=note>Nothing to draw: {reason}." in page.read_text()
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert set(CHARTS) - drawn == {"curves", "curves_by_time", "improvement", "throughput"}


def test_group_without_a_line_is_named() -> None:
    run = run_of([5.0], 9)
    columns = {name: each for name, each in run.metrics.read.items() if name != EVAL_RETURN}
    silent = with_columns(run, columns)
    groups = [*GROUPS, Group("C", {"a<b>": "3"}, [[silent]], [])]

    assert [each.name for each in make_charts(groups, EVAL_RETURN) if "Not drawn" in each.note] == [
        *("curves", "curves_by_time", "final", "improvement", "profile", "efficiency"),
    ]
    assert "Not drawn: C (no eval/episode_return in its runs)." in chart("final", groups).note


def test_files_for_a_paper_hold_the_charts_and_the_table(tmp_path: Path) -> None:
    folder = write_paper_files(tmp_path / "paper", GROUPS, EVAL_RETURN)

    names = {path.name for path in folder.iterdir()}
    drawn = {f"{name}.{kind}" for name in CHARTS for kind in ("pdf", "svg", "csv")}
    assert names == drawn | {"groups.csv", "groups.tex"}
    assert (folder / "curves.pdf").read_bytes()[:5] == b"%PDF-"
    assert "</svg>" in (folder / "curves.svg").read_text()
    final = (folder / "final.csv").read_text().splitlines()
    assert final[0] == "label,value,low,high,seeds"
    assert final[1].startswith("two,80.0,")
    assert final[1].endswith(",60.0 70.0 80.0 90.0 100.0")
    table = (folder / "groups.tex").read_text().splitlines()
    assert table[0] == r"\begin{tabular}{llllll}"
    assert table[2].startswith(
        r"group & a\textless{}b\textgreater{} & seeds & IQM & 95 \% interval"
    )
    assert table[4].startswith("two & 2 & 5 & 80")


def test_latex_escapes_what_a_config_may_contain() -> None:
    row = latex_table(["a"], [["x_1 & 50% \\ ^{2} $"]]).splitlines()[4]

    assert row == r"x\_1 \& 50\% \textbackslash{} \textasciicircum{}\{2\} \$ \\"


def write_tagged(folder: Path) -> str:
    """The report of groups with a tag in their names."""
    groups = [group._replace(name=group.label) for group in GROUPS]
    return write_report(folder / "tagged", groups, EVAL_RETURN).read_text()


def test_report_is_one_page_and_a_png_per_chart(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report", GROUPS, EVAL_RETURN)

    text = page.read_text()
    assert sorted(path.stem for path in page.parent.glob("*.png")) == sorted(CHARTS)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in page.parent.glob("*.png"))
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)  # loads nothing
    assert "two is better than one" in text
    assert "<th>a&lt;b&gt;</th>" in text
    assert '"name":"a&lt;b&gt;=1"' in write_tagged(tmp_path)  # not a tag for plotly
    assert "run3" in text
    assert "10 runs in 2 groups" in text


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
    height = page.evaluate("() => document.querySelector('#curves')._fullLayout.yaxis.d2p(80)")

    def shows_a_value() -> bool:
        """Point at the end of the best curve, again if the page was still being laid out."""
        for distance in (20, 2):
            page.mouse.move(box["x"] + box["width"] - distance, box["y"] + height)
        return page.locator("#curves .hoverlayer .hovertext").count() > 0

    wait_until(shows_a_value, 30)
    visible = "() => document.querySelector('#curves').data.map(trace => trace.visible ?? true)"
    assert page.evaluate(visible) == [True] * 6
    page.locator("#curves .legendtoggle").first.click()
    page.wait_for_function(
        "() => document.querySelector('#curves').data.some(t => t.visible === 'legendonly')"
    )
    assert page.evaluate(visible)[:3] == ["legendonly"] * 3  # the band and its line
    assert requested == [address]
    assert errors == []
