"""Threads of torch: how long they spin while they wait for each other."""

from __future__ import annotations

import sys

import pytest
from conftest import call

SCRIPT = """
import os
os.environ.pop("OMP_WAIT_POLICY", None), os.environ.pop("GOMP_SPINCOUNT", None)
os.environ.update({given})
import ml_pipeline
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "None 1000"),
        ({"OMP_WAIT_POLICY": "active"}, "active None"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7"),
    ],
)
def test_importing_the_package_limits_spinning_unless_the_user_chose(
    given: dict[str, str], wanted: str
) -> None:
    done = call(sys.executable, "-c", SCRIPT.format(given=given))

    assert (done.stdout.strip(), done.stderr) == (wanted, "")
