"""Checks that the config classes share; an error names the full key, the rule and the value."""

from __future__ import annotations

import math


def check(fact: bool, key: str, rule: str, value: object) -> None:
    """Raise unless ``fact`` holds; ``key`` is the full config key."""
    if not fact:
        raise ValueError(f"{key}={'null' if value is None else value}: must be {rule}")


def integer_steps(key: str, value: float) -> int:
    """A positive integer; YAML reads 1e5 as a float, so step counts arrive as floats."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    is_integer = is_number and value >= 1 and float(value).is_integer()
    check(is_integer, key, "an integer of at least 1", value)
    return int(value)
