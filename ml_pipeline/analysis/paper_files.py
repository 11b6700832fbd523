"""The figures and tables of a comparison as files for a paper: PDF, SVG, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_pipeline.analysis.charts import make_charts
from ml_pipeline.analysis.compare import Group, groups_cells
from ml_pipeline.analysis.figures import Chart
from ml_pipeline.analysis.page import write_csv, write_drawing
from ml_pipeline.analysis.report import file_name
from ml_pipeline.analysis.suite import Suite, suite_cells, suite_charts
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.run_folder import RunFolderError

_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
)


def write_paper_files(folder: Path, groups: Sequence[Group], metric: str) -> Path:
    """Write each chart as .pdf, .svg and .csv, and the table of groups as .csv and .tex."""
    return _write(folder, make_charts(groups, metric), *groups_cells(groups, metric))


def write_suite_files(folder: Path, suite: Suite, metric: str) -> Path:
    """The same for several envs: the scores in ``folder``, each env in a folder below it."""
    _write(folder, suite_charts(suite), *suite_cells(suite, metric))
    for env, groups in suite.groups.items():
        write_paper_files(folder / file_name(env), groups, metric)
    return folder


def _write(
    folder: Path, charts: Sequence[Chart], titles: Sequence[str], rows: Sequence[Sequence[str]]
) -> Path:
    import_extra("matplotlib", needed_by="--paper")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            if not chart.is_empty:
                write_drawing(folder / f"{chart.name}.pdf", chart, title=False)
                write_drawing(folder / f"{chart.name}.svg", chart, title=False)
                write_csv(folder / f"{chart.name}.csv", _numbers(chart))
        write_csv(folder / "groups.csv", [titles, *rows])
        (folder / "groups.tex").write_text(latex_table(titles, rows), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write the files of --paper into {folder}: {error}") from error
    return folder


def latex_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular with the rules of booktabs."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in cells) for cells in (titles, *rows)]
    head, *body = (rf"{line} \\" for line in lines)
    parts = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    columns = "l" * len(titles)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *parts, r"\end{tabular}"]) + "\n"


def _numbers(chart: Chart) -> Iterator[Sequence[object]]:
    if chart.bars:
        yield "label", "value", "low", "high", "seeds"
        for bar in chart.bars:
            seeds = " ".join(map(str, bar.points.tolist()))
            yield bar.label, bar.value, bar.low, bar.high, seeds
        return
    yield "label", chart.x_title, "value", "low", "high"
    for line in chart.lines:
        for point in zip(line.x, line.y, line.low, line.high, strict=True):
            yield line.label, *map(float, point)
