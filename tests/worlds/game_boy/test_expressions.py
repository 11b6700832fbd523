"""Expressions of game files: their values, and everything that is refused."""

from __future__ import annotations

import ast

import pytest

from ml_pipeline.worlds.game_boy.expressions import Bounds, ExpressionError, condition, number

NAMES = {"score": Bounds(0, 99), "lives": Bounds(1, 3), "speed": Bounds(-8, 7)}
NOW, DELTA = [40, 2, -3], [10, -1, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("delta.score", 10),
        ("score / 16 - 0.5 * lives", 1.5),
        ("-(score // 7) % 4", 3),
        ("abs(speed) + max(lives, score, 1) + min(lives, 1)", 44),
        ("sign(speed) + sign(delta.speed) + sign(score)", 0),
        ("bits(score)", 2),  # 40 = 0b101000
        ("1.0 if delta.lives < 0 and not score > 50 else 0.0", 1.0),
        ("score / max(speed, 1)", 40.0),
        ("score / lives", 20.0),  # the bounds exclude 0
        ("1_000 if 0 < lives <= 3 or score == 1 else 0", 1000),
    ],
)
def test_a_number_has_the_value_of_python(text: str, value: float) -> None:
    assert number(text, NAMES)(NOW, DELTA) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("lives == 2", True), ("score >= 41 or lives != 2", False), ("1 < lives < 2", False)],
)
def test_a_condition_is_true_or_false(text: str, value: bool) -> None:
    assert condition(text, NAMES)(NOW, DELTA) is value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delta.scor", "`delta.scor` is unknown; did you mean score?"),
        ("gold + 1", "`gold` is unknown; the names are score, lives, speed"),
        ("score +", "is not an expression"),
        ("", "is not an expression"),
        ("score > 3", "is a condition, not a number; write 1.0 if score > 3 else 0.0"),
        ("1 + (score > 3)", "`score > 3` is a condition, but a number is needed"),
        ("1 if score else 0", "`score` is a number, but a condition is needed"),
        ("score / speed", r"`score / speed` can divide by zero; write max\(speed, 1\)"),
        ("1 % (lives - 2)", "can divide by zero"),
        ("score ** 2", r"of the operators, use \+ - \* / // %"),
        ("~score", "of the signs, use - and +"),
        ("True", "`True` is not a number"),
        ("'a'", "is not a number"),
        ("1e400", "is too large"),
        ("1e200 * score * 1e200", "can become infinite"),
        ("score.real", "only delta.NAME has a dot"),
        ("delta.score.real", "only delta.NAME has a dot"),
        ("delta", "`delta` is unknown"),
        ("pow(score, 2)", "the functions are abs, bits, max, min, sign"),
        ("max(score)", "max takes at least 2"),
        ("abs(score, 1)", "abs takes 1"),
        ("abs(x=score)", "the functions are"),
        ("abs(*score)", "is not allowed"),
        ("bits(speed)", r"must be bits\(NAME\), of a type without a sign"),
        ("bits(score + 1)", r"must be bits\(NAME\)"),
        ("score in lives", "compare with == !="),
        ("[score][0]", "is not allowed; use numbers"),
        ("(lambda: 1)()", "the functions are"),
        ("__import__('os').system('true')", "the functions are"),
        ("().__class__.__bases__", "only delta.NAME has a dot"),
        ("[x for x in score]", "is not allowed"),
        ("(score := 3)", "is not allowed"),
        ("f'{score}'", "is not allowed"),
        ("-" * 60 + "1", "nested more than 50 levels"),
        ("(" * 240 + "1" + ")" * 240, "is not an expression|nested more"),
        ("1+" * 300 + "1", "at most 500 characters"),
        ("score\0", "is not an expression"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        number(text, NAMES)


def test_a_number_is_not_a_condition() -> None:
    with pytest.raises(ExpressionError, match="is a number, not a condition; compare it: score"):
        condition("score", NAMES)


def test_every_kind_of_node_that_is_not_listed_is_refused() -> None:
    """A node that a new Python adds must not slip through."""
    from ml_pipeline.worlds.game_boy.expressions import _Builder

    kinds = {each.__name__ for each in ast.expr.__subclasses__()}
    handled = {each for each in kinds if hasattr(_Builder, f"_{each.lower()}")}

    allowed = {"Constant", "Name", "Attribute", "UnaryOp", "BinOp", "Compare", "BoolOp"}
    assert handled == {*allowed, "IfExp", "Call"}
