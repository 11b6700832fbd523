"""Fingerprints: what counts as a change of readable code, and what does not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from ml_pipeline.mirrors import fingerprint, why_not

BASE = """
SCALE = 2.0

def double(x):
    return SCALE * x

class Doubler:
    def __call__(self, x):
        return double(x)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of this text, and returns the fingerprint of a name in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = iter(range(100))

    def write(text: str, name: str = "double") -> str:
        module = f"mirrored_{next(count)}"
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        return fingerprint(f"{module}.{name}")

    yield write
    for name in [each for each in sys.modules if each.startswith("mirrored_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "edit",
    [
        ("return SCALE * x", "return SCALE * x  # a comment"),
        ("return SCALE * x", '"""A docstring."""\n    return SCALE * x'),
        ("def double(x):", "def double(x: float) -> float:"),
        ("return SCALE * x", "return (\n        SCALE * x\n    )"),
    ],
    ids=["comment", "docstring", "annotations", "formatting"],
)
def test_what_does_not_change_the_result_keeps_the_fingerprint(
    edit: tuple[str, str], mark: Any
) -> None:
    assert mark(BASE.replace(*edit)) == mark(BASE)


@pytest.mark.parametrize(
    "edit",
    [
        ("SCALE * x", "SCALE * x * 1.0"),
        ("SCALE * x", "x * SCALE"),
        ("def double(x):", "def double(x, y=0):"),
        ("def double(x):", "def double(x):\n    print(x)"),
    ],
)
def test_any_other_edit_changes_the_fingerprint(edit: tuple[str, str], mark: Any) -> None:
    assert mark(BASE.replace(*edit)) != mark(BASE)


def test_constant_has_the_fingerprint_of_its_value(mark: Any) -> None:
    assert mark(BASE, "SCALE") == mark(BASE + "\n", "SCALE")
    assert mark(BASE, "SCALE") != mark(BASE.replace("2.0", "3.0"), "SCALE")


def test_code_without_a_source_is_not_trusted(mark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = mark(BASE)
    module = sys.modules["mirrored_0"]
    made: dict[str, Any] = {}
    exec("def double(x): return 2.0 * x", made)
    monkeypatch.setattr(module, "double", made["double"])

    assert why_not({"mirrored_0.double": recorded}) == "the source of double cannot be read"


def test_instance_and_subclass_with_their_own_method_are_found(mark: Any) -> None:
    table = {"mirrored_0.Doubler.__call__": mark(BASE, "Doubler.__call__")}
    doubler = sys.modules["mirrored_0"].Doubler

    class Tripler(doubler):  # type: ignore[misc,valid-type]
        def __call__(self, x: Any) -> Any:
            return 3.0 * x

    patched = doubler()
    vars(patched)["__call__"] = abs

    assert why_not(table, doubler(), "another object") is None
    assert why_not(table, Tripler()) == "Tripler has its own __call__"
    assert why_not(table, patched) == "Doubler has its own __call__"


def test_renamed_class_or_module_counts_as_a_change(mark: Any) -> None:
    mark(BASE)

    assert why_not({"mirrored_0.Gone.__call__": "0"}) == "mirrored_0.Gone is gone"
    assert why_not({"no_such_module.double": "0"}) == "no_such_module is gone"
