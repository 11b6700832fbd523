"""Checks that the config classes share; an error names the full key, the rule and the value."""

from __future__ import annotations

import math
import re


def check(fact: bool, key: str, rule: str, value: object) -> None:
    """Raise unless ``fact`` holds; ``key`` is the full config key."""
    if not fact:
        raise ValueError(f"{key}={'null' if value is None else value}: must be {rule}")


def integer_steps(key: str, value: float) -> int:
    """A positive integer; YAML reads 1e5 as a float, so step counts arrive as floats."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    is_integer = is_number and value >= 1 and float(value).is_integer()
    check(is_integer, key, f"an integer of at least 1{number_to_write(value)}", value)
    return int(value)


def number_to_write(value: object) -> str:
    """The end of an error for a value that is almost an integer of at least 1."""
    number = number_meant(str(value)) or ""
    is_another = number.isdigit() and int(number) >= 1 and number != str(value)
    return f"; write {number}" if is_another else ""


def number_meant(text: str) -> str | None:
    """1M, 1000k, 1,000,000, 1 000 000, 1.000.000, 2**20 and 1e6 as an integer; else None."""
    text = text.strip().lower()
    if re.fullmatch(r"\d{1,3}([ ,'_]\d{3})+|\d{1,3}(\.\d{3}){2,}", text):
        return re.sub(r"\D", "", text)
    if decimal := re.fullmatch(r"0,(\d+)", text):
        return f"0.{decimal[1]}"
    if power := re.fullmatch(r"(\d{1,2})(?:\*\*|\^)(\d{1,2})", text):
        return str(int(power[1]) ** int(power[2]))
    unit = re.fullmatch(r"([\d.]+)\s*(k|m|b|g|mio|million|millions|thousand)", text)
    exponent = {"k": 3, "t": 3, "b": 9, "g": 9}.get(unit[2][0], 6) if unit else 0
    try:
        number = float(unit[1] if unit else text) * 10**exponent
    except ValueError:
        return None
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else None
