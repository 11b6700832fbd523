"""Notebooks are kept stripped; ``make notebooks`` executes them."""

from __future__ import annotations

import json

import pytest
from conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_in_order() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_tells_something_and_draws(path: object) -> None:
    cells = json.loads(path.read_text())["cells"]  # type: ignore[attr-defined]

    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert any("plt." in "".join(cell["source"]) for cell in code)
