"""The page of a report: every part takes plain text and escapes it."""

from __future__ import annotations

import pytest

from ml_pipeline.analysis.page import Bullets, Link, Page, Paragraph, Part, Section, Table

NAME = '<a> & "b"'
SHOWN = "&lt;a&gt; &amp; &quot;b&quot;"


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (Paragraph(NAME), f"<p>{SHOWN}</p>"),
        (Paragraph(NAME, "bold"), f"<p><b>{SHOWN}</b></p>"),
        (Paragraph(NAME, "note"), f"<p class=note>{SHOWN}</p>"),
        (Bullets([NAME, "c"]), f"<ul><li>{SHOWN}</li><li>c</li></ul>"),
        (Bullets([]), ""),
        (Table([NAME], [[NAME], [1]]), f"<th>{SHOWN}</th>"),
        (Table([""], [[NAME], [1]]), f"<tr><td>{SHOWN}</td></tr><tr><td>1</td></tr>"),
        (Table([""], [[Link(NAME, NAME)]]), f'<td><a href="{SHOWN}">{SHOWN}</a></td>'),
        (Section(NAME, [Paragraph("c")]), f"<h2>{SHOWN}</h2>\n<p>c</p>"),
    ],
)
def test_text_of_a_part_is_escaped(part: Part, shown: str) -> None:
    assert shown in part.html()


def test_title_heading_and_facts_of_a_page_are_escaped() -> None:
    text = Page(NAME, NAME, NAME, [Section("", [])]).html()

    for tag in ("<title>", "<h1>", '<p class="facts">'):
        assert f"{tag}{SHOWN}</" in text
    assert NAME not in text
    assert "<h2>" not in text
