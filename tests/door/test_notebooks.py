"""Notebooks are stored without outputs; ``make notebooks`` runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def test_notebooks_are_numbered() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_starts_with_text_and_plots(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]

    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert any("plt." in "".join(cell["source"]) for cell in code)
