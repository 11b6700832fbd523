"""Documentation matches the code, and its links and paths resolve."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from conftest import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)]+)\)")
FILE = re.compile(r"(?<![\w/])(?:ml_pipeline|tests|benchmarks|conf|docs)/[\w/.-]+\.\w+")


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_their_anchors_resolve(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]

    assert [link for link in links if not resolves(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path) -> None:
    files = [file for file in FILE.findall(page.read_text()) if "NAME" not in file]

    assert [file for file in files if not (REPOSITORY / file).exists()] == []


def test_readme_links_every_page_of_the_docs() -> None:
    links = LINK.findall(README.read_text())

    assert [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in links] == []


def test_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_speed_chart_shows_figures_of_the_benchmarks_page() -> None:
    figures = re.findall(r">([\d.]+x|[\d,]+ steps)", (DOCS / "speed.svg").read_text())
    benchmarks = (DOCS / "benchmarks.md").read_text()

    assert len(figures) == 6
    assert [each for each in figures if each.replace(" steps", "/s") not in benchmarks] == []


def test_config_reference_matches_the_dataclasses() -> None:
    page = runpy.run_path(str(DOCS / "config_reference.py"))["page"]()

    assert (DOCS / "config.md").read_text() == page + "\n"
