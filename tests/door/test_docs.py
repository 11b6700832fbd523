"""The documentation: in step with the code, and without dead links."""

from __future__ import annotations

import re
import runpy

import pytest
from conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_the_config_reference_is_what_the_dataclasses_say() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / "config_reference.py"))["page"]()

    assert (REPOSITORY / "docs" / "config.md").read_text() == made + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: object) -> None:
    text = page.read_text()  # type: ignore[attr-defined]
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]

    folder = page.parent  # type: ignore[attr-defined]
    assert [link for link in links if not (folder / link).exists()] == []
