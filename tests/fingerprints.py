"""Records the fingerprints of the code that fast backends repeat: ``python tests/fingerprints.py``.

Do this after you changed readable code and its mirror in the same way, and the contracts pass:
``pytest tests/contracts/test_backends.py``. Never do it to silence a run that uses plain torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from ml_pipeline.mirrors import fingerprint

REPOSITORY = Path(__file__).resolve().parents[1]
_ENTRY = re.compile(r'"(ml_pipeline(?:\.\w+)+)": "(\w*)"')


def recorded() -> dict[tuple[Path, str], str]:
    """(file, mirrored path) -> fingerprint, of every table in the package."""
    texts = {file: file.read_text() for file in sorted((REPOSITORY / "ml_pipeline").rglob("*.py"))}
    return {
        (file, path): mark
        for file, text in texts.items()
        if ": Mirrored = {" in text
        for path, mark in _ENTRY.findall(text)
    }


def record() -> None:
    for file in {file for file, _ in recorded()}:
        text = file.read_text()
        file.write_text(_ENTRY.sub(lambda m: f'"{m[1]}": "{fingerprint(m[1])}"', text))


if __name__ == "__main__":
    record()
