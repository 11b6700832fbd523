"""Page: a report as one HTML file that needs no network, and a PNG per figure beside it.

A page has sections and a section has parts. Parts take plain text; they escape it themselves.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ml_pipeline.extras import import_extra
from ml_pipeline.runs.run_folder import RunFolderError, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure as PlotlyFigure


class Part(Protocol):
    """Something between two headings."""

    def html(self) -> str: ...


class Paragraph(NamedTuple):
    text: str
    style: Literal["plain", "bold", "note"] = "plain"

    def html(self) -> str:
        text = html.escape(self.text)
        if self.style == "bold":
            return f"<p><b>{text}</b></p>"
        return f"<p class=note>{text}</p>" if self.style == "note" else f"<p>{text}</p>"


class Bullets(NamedTuple):
    """A list; without lines it is left out."""

    lines: Sequence[str]

    def html(self) -> str:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines)
        return f"<ul>{items}</ul>" if items else ""


class Link(NamedTuple):
    """A cell of a table that leads to another file."""

    address: str
    text: str


class Table(NamedTuple):
    titles: Sequence[str]
    rows: Sequence[Sequence[object]]  # a Link, or anything with a text

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(title)}</th>" for title in self.titles)
        rows = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: object) -> str:
    if isinstance(cell, Link):
        return f'<a href="{html.escape(cell.address)}">{html.escape(cell.text)}</a>'
    return html.escape(str(cell))


class Figure(Protocol):
    """Draws itself twice: in the page by plotly, with hover texts, and as a PNG by matplotlib."""

    @property
    def name(self) -> str: ...  # of the PNG file, and the id of its element in the page

    @property
    def title(self) -> str: ...

    @property
    def note(self) -> str: ...  # below the figure

    @property
    def is_empty(self) -> bool: ...  # then only its title and note are shown

    @property
    def height(self) -> int: ...  # pixels in the page

    @property
    def png_size(self) -> tuple[float, float]: ...  # width and height in inches

    def draw_plotly(self, figure: PlotlyFigure) -> None: ...

    def draw_png(self, axes: Axes) -> None: ...


class Figures(NamedTuple):
    figures: Sequence[Figure]
    are_side_by_side: bool = True

    def html(self) -> str:
        drawn = "\n".join(map(_figure_html, self.figures))
        return f'<div class="charts">\n{drawn}\n</div>' if self.are_side_by_side else drawn


class Section(NamedTuple):
    heading: str  # empty: none, for the first section
    parts: Sequence[Part]

    def html(self) -> str:
        heading = f"<h2>{html.escape(self.heading)}</h2>\n" if self.heading else ""
        return heading + "\n".join(part.html() for part in self.parts)


class Page(NamedTuple):
    title: str  # of the browser's tab
    heading: str
    facts: str  # in small print below the heading
    sections: Sequence[Section]

    def html(self) -> str:
        from plotly.offline import get_plotlyjs

        return _PAGE.format(
            title=html.escape(self.title),
            script=get_plotlyjs(),
            heading=html.escape(self.heading),
            facts=html.escape(self.facts),
            sections="\n".join(section.html() for section in self.sections),
        )


def write_page(path: Path, page: Page) -> Path:
    """Write the page to ``path`` and its PNGs beside it; returns ``path``."""
    import_extra("plotly", needed_by="the report")
    import_extra("matplotlib", needed_by="the report")
    parts = [part for section in page.sections for part in section.parts]
    figures = [each for part in parts if isinstance(part, Figures) for each in part.figures]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            if not figure.is_empty:
                write_drawing(path.parent / f"{figure.name}.png", figure)
    except OSError as error:
        raise RunFolderError(f"cannot write the report into {path.parent}: {error}") from error
    write_text(path, page.html())
    return path


def write_drawing(path: Path, figure: Figure, *, title: bool = True) -> None:
    """Draw a figure by matplotlib; the suffix of ``path`` chooses the format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context({"text.parse_math": False, "pdf.fonttype": 42}):  # a name may contain a $
        canvas = Canvas(figsize=figure.png_size, layout="constrained")
        axes = canvas.subplots()
        if title:
            axes.set_title(figure.title)
        figure.draw_png(axes)
        canvas.savefig(path, dpi=110)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a table beside a page; the first row has the titles."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def _figure_html(figure: Figure) -> str:
    note = Paragraph(figure.note, "note").html()
    if figure.is_empty:
        return f"<section><h3>{html.escape(figure.title)}</h3>{note}</section>"
    from plotly.graph_objects import Figure as PlotlyFigure

    layout = {
        "title": figure.title,
        "template": "plotly_white",
        "margin": {"l": 60, "r": 20, "t": 50, "b": 50},
        "height": figure.height,
    }
    drawn = PlotlyFigure(layout=layout)  # update_layout would copy two templates
    figure.draw_plotly(drawn)
    element = drawn.to_html(
        full_html=False, include_plotlyjs=False, div_id=figure.name, config={"responsive": True}
    )
    return f"<section>{element}{note}</section>"


def now_text() -> str:
    """The current minute with its time zone."""
    return datetime.now().astimezone().isoformat(" ", "minutes")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; color: #222; }}
h1 {{ margin-bottom: 0; }}
.facts, .note {{ color: #666; font-size: 0.85rem; }}
.note {{ margin: 0 0 0 60px; }}
h3 {{ color: #2a3f5f; font-size: 17px; font-weight: normal; margin: 7px 0 8px 30px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem; }}
section {{ min-width: 0; }}
table {{ border-collapse: collapse; margin: 0.5rem 0 1.5rem; }}
th, td {{ text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #ddd; }}
@media (max-width: 40rem) {{ .charts {{ grid-template-columns: 1fr; }} }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{heading}</h1>
<p class="facts">{facts}</p>
{sections}
<script>dispatchEvent(new Event("resize"));</script>
</body>
</html>
"""
