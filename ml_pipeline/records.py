"""Metrics and StateDict: the two records that every layer of the package exchanges."""

from __future__ import annotations

from typing import Any

Metrics = dict[str, float]  # "group/name" -> value; a metric without a value is absent
StateDict = dict[str, Any]  # tensors, numbers, strings, and lists and dicts of these: no code
