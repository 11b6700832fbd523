"""Expressions: arithmetic over named numbers, checked before the first step and never ``eval``.

Python parses the text; every node that is not listed here is refused. The result is a tree of
closures, which is several times faster than interpreting the syntax tree at every step. An
expression that passes has a finite value for all numbers within their bounds: a divisor that can
be zero is refused. Libraries such as simpleeval find a wrong name only when it is evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

Values = Sequence[float]
Evaluate = Callable[[Values, Values], float]  # the numbers, and their changes since the last step

DELTA = "delta"  # delta.score is the change of score
_LONGEST = 500  # characters
_DEEPEST = 50  # levels of the tree

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS = ("abs", "bits", "max", "min", "sign")


class ExpressionError(ValueError):
    """The text is not an expression of this language."""


class Bounds(NamedTuple):
    """The smallest and the largest value of a number."""

    low: float
    high: float


class _Part(NamedTuple):
    evaluate: Evaluate
    bounds: Bounds | None  # None: a condition, which is true or false


def number(text: str, names: Mapping[str, Bounds]) -> Evaluate:
    """The expression of a number; ``names`` in the order of the values that it will get."""
    part = _parse(text, names)
    if part.bounds is None:
        raise ExpressionError(
            f"`{text}` is a condition, not a number; write 1.0 if {text} else 0.0"
        )
    return part.evaluate


def condition(text: str, names: Mapping[str, Bounds]) -> Evaluate:
    """The expression of a condition, such as ``lives == 0``."""
    part = _parse(text, names)
    if part.bounds is not None:
        raise ExpressionError(f"`{text}` is a number, not a condition; compare it: {text} > 0")
    return part.evaluate


def _parse(text: str, names: Mapping[str, Bounds]) -> _Part:
    if len(text) > _LONGEST:
        raise ExpressionError(f"an expression has at most {_LONGEST} characters, not {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"`{text}` is not an expression: {error}") from error
    return _Builder(text, names).build(tree.body, 1)


class _Builder:
    """Turns syntax nodes into closures and bounds."""

    def __init__(self, text: str, names: Mapping[str, Bounds]) -> None:
        self._text = text
        self._names = dict(names)
        self._places = {name: place for place, name in enumerate(names)}

    def build(self, node: ast.expr, depth: int) -> _Part:
        if depth > _DEEPEST:
            raise ExpressionError(f"`{self._text}` is nested more than {_DEEPEST} levels deep")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._refused(node, "is not allowed; use numbers, names, + - * / // % and ( )")
        part: _Part = method(node, depth + 1)
        if part.bounds is not None and not all(map(math.isfinite, part.bounds)):
            raise self._refused(node, "can become infinite; use smaller numbers")
        return part

    def _constant(self, node: ast.Constant, depth: int) -> _Part:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._refused(node, "is not a number")
        if abs(value) > 1e300:
            raise self._refused(node, "is too large")
        return _Part(lambda now, delta: value, Bounds(value, value))

    def _name(self, node: ast.Name, depth: int) -> _Part:
        place, bounds = self._find(node, node.id)
        return _Part(lambda now, delta: now[place], bounds)

    def _attribute(self, node: ast.Attribute, depth: int) -> _Part:
        if not (isinstance(node.value, ast.Name) and node.value.id == DELTA):
            raise self._refused(node, f"is not allowed; only {DELTA}.NAME has a dot")
        place, (low, high) = self._find(node, node.attr)
        return _Part(lambda now, delta: delta[place], Bounds(low - high, high - low))

    def _find(self, node: ast.expr, name: str) -> tuple[int, Bounds]:
        if name not in self._names:
            near = get_close_matches(name, self._names, n=1)
            known = f"the names are {', '.join(self._names)}" if self._names else "there are none"
            raise self._refused(
                node, f"is unknown; {f'did you mean {near[0]}?' if near else known}"
            )
        return self._places[name], self._names[name]

    def _unaryop(self, node: ast.UnaryOp, depth: int) -> _Part:
        if isinstance(node.op, ast.Not):
            inner = self._condition(node.operand, depth)
            return _Part(lambda now, delta: not inner(now, delta), None)
        if not isinstance(node.op, (ast.USub, ast.UAdd)):
            raise self._refused(node, "is not allowed; of the signs, use - and +")
        value, (low, high) = self._number(node.operand, depth)
        if isinstance(node.op, ast.UAdd):
            return _Part(value, Bounds(low, high))
        return _Part(lambda now, delta: -value(now, delta), Bounds(-high, -low))

    def _binop(self, node: ast.BinOp, depth: int) -> _Part:
        function = _ARITHMETIC.get(type(node.op))
        if function is None:
            raise self._refused(node, "is not allowed; of the operators, use + - * / // %")
        left, ours = self._number(node.left, depth)
        right, theirs = self._number(node.right, depth)
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and theirs.low <= 0 <= theirs.high:
            divisor = ast.unparse(node.right)
            raise self._refused(node, f"can divide by zero; write max({divisor}, 1) or set bounds")
        return _Part(
            lambda now, delta: function(left(now, delta), right(now, delta)),
            _bounds_of(node.op, function, ours, theirs),
        )

    def _compare(self, node: ast.Compare, depth: int) -> _Part:
        values = [self._number(each, depth)[0] for each in (node.left, *node.comparators)]
        for op in node.ops:
            if type(op) not in _COMPARISONS:
                raise self._refused(node, "is not allowed; compare with == != < <= > >=")
        functions = [_COMPARISONS[type(op)] for op in node.ops]
        if len(functions) == 1:
            function, left, right = functions[0], values[0], values[1]
            return _Part(lambda now, delta: function(left(now, delta), right(now, delta)), None)

        def all_hold(now: Values, delta: Values) -> bool:
            found = [value(now, delta) for value in values]
            pairs = zip(functions, found, found[1:], strict=False)
            return all(function(left, right) for function, left, right in pairs)

        return _Part(all_hold, None)

    def _boolop(self, node: ast.BoolOp, depth: int) -> _Part:
        parts = [self._condition(each, depth) for each in node.values]
        if isinstance(node.op, ast.And):
            return _Part(lambda now, delta: all(part(now, delta) for part in parts), None)
        return _Part(lambda now, delta: any(part(now, delta) for part in parts), None)

    def _ifexp(self, node: ast.IfExp, depth: int) -> _Part:
        test = self._condition(node.test, depth)
        yes, ours = self._number(node.body, depth)
        no, theirs = self._number(node.orelse, depth)
        return _Part(
            lambda now, delta: yes(now, delta) if test(now, delta) else no(now, delta),
            Bounds(min(ours.low, theirs.low), max(ours.high, theirs.high)),
        )

    def _call(self, node: ast.Call, depth: int) -> _Part:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in FUNCTIONS or node.keywords:
            raise self._refused(node, f"is not allowed; the functions are {', '.join(FUNCTIONS)}")
        is_choice = name in ("max", "min")
        if len(node.args) != 1 and not (is_choice and len(node.args) >= 2):
            raise self._refused(node, f"has {len(node.args)} arguments; {name} takes 1")
        if is_choice and len(node.args) == 1:
            raise self._refused(node, f"has 1 argument; {name} takes at least 2")
        parts = [self._number(each, depth) for each in node.args]
        if is_choice:
            choose: Callable[[Iterable[float]], float] = max if name == "max" else min
            values = [value for value, _ in parts]
            return _Part(
                lambda now, delta: choose([value(now, delta) for value in values]),
                Bounds(
                    choose(bounds.low for _, bounds in parts),
                    choose(bounds.high for _, bounds in parts),
                ),
            )
        value, (low, high) = parts[0]
        if name == "sign":
            signs = Bounds(float(low > 0) - (low < 0), float(high > 0) - (high < 0))
            return _Part(lambda now, delta: _sign(value(now, delta)), signs)
        if name == "bits":
            if not isinstance(node.args[0], ast.Name) or low < 0:
                raise self._refused(node, "must be bits(NAME), of a type without a sign")
            most = int(high).bit_length()
            return _Part(lambda now, delta: int(value(now, delta)).bit_count(), Bounds(0, most))
        nearest = 0 if low <= 0 <= high else min(abs(low), abs(high))
        largest = max(abs(low), abs(high))
        return _Part(lambda now, delta: abs(value(now, delta)), Bounds(nearest, largest))

    def _number(self, node: ast.expr, depth: int) -> tuple[Evaluate, Bounds]:
        part = self.build(node, depth)
        if part.bounds is None:
            raise self._refused(node, "is a condition, but a number is needed here")
        return part.evaluate, part.bounds

    def _condition(self, node: ast.expr, depth: int) -> Evaluate:
        part = self.build(node, depth)
        if part.bounds is not None:
            raise self._refused(node, "is a number, but a condition is needed here")
        return part.evaluate

    def _refused(self, node: ast.expr, reason: str) -> ExpressionError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return ExpressionError(f"`{part}` {reason}")


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _bounds_of(
    op: ast.operator, function: Callable[[float, float], float], left: Bounds, right: Bounds
) -> Bounds:
    """The bounds of a result; those of sums, products and quotients are at the corners."""
    if isinstance(op, ast.Mod):  # has the sign of the divisor
        return Bounds(min(right.low, 0), max(right.high, 0))
    try:
        corners = [function(float(ours), float(theirs)) for ours in left for theirs in right]
    except OverflowError:
        return Bounds(-math.inf, math.inf)
    return Bounds(min(corners), max(corners))
