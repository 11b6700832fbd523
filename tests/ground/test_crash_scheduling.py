"""The suite ends, and runs all other tests, after one has crashed its worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import TESTS, call

SUITE = """
import os, pytest
@pytest.mark.parametrize("i", range(3))
@pytest.mark.xdist_group("one")
def test_group(i): assert i != 1 or os._exit(1)
def test_alone(): pass
def test_last(): os._exit(1)
"""


@pytest.mark.slow
def test_every_other_test_runs_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    hook = (TESTS / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(hook)

    pytest_command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-q"]
    result = call(*pytest_command, cwd=tmp_path, PYTHONPATH=str(TESTS))

    assert "2 failed, 3 passed" in result.stdout
    for name in ("test_group[1]@one", "test_last"):
        assert f"crashed while running 'test_suite.py::{name}'" in result.stdout
