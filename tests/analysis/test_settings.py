"""Config values in tables: differing keys, short names, and the width of the table."""

from __future__ import annotations

from typing import Any

import pytest

from ml_pipeline.analysis.settings import (
    differing_keys,
    fitted,
    short_names,
    shown_value,
    table_lines,
)
from ml_pipeline.runs.run_folder import flat


def test_flat_config_has_dotted_keys_and_keeps_empty_groups() -> None:
    config = {"seed": 1, "agent": {"gamma": 0.9}, "logger": {}}

    assert flat(config) == {"seed": 1, "agent.gamma": 0.9, "logger": {}}


def test_differing_keys_include_a_key_that_one_config_lacks() -> None:
    assert differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == ["b", "c"]


def test_option_that_is_off_equals_one_that_older_runs_lack() -> None:
    old, off, on = {"seed": 1}, {"seed": 1, "a": False, "b": None}, {"seed": 1, "a": True, "b": 0}

    assert differing_keys([old, off]) == []
    assert differing_keys([old, on]) == ["a", "b"]
    assert differing_keys([off, on]) == ["a", "b"]
    assert differing_keys([{"a": None}, {"a": False}]) == ["a"]


def test_settings_of_one_algorithm_differ_only_between_its_own_runs() -> None:
    ppo = {"agent.algorithm": "ppo.PPO", "agent.gamma": 0.9, "agent.clip_range": 0.2}
    sac = {"agent.algorithm": "sac.SAC", "agent.gamma": 0.8, "agent.tau": 0.5}

    assert differing_keys([ppo, sac]) == ["agent.algorithm", "agent.gamma"]
    assert differing_keys([ppo, sac, {**sac, "agent.tau": 0.6}]) == [
        *("agent.algorithm", "agent.gamma", "agent.tau"),
    ]


def test_seed_is_the_first_key_and_keys_without_effect_on_learning_are_last() -> None:
    keys = ["n_envs", "seed", "device", "vec_env.mode", "agent.gamma"]
    configs = [dict.fromkeys(keys, value) for value in (1, 2)]

    assert differing_keys(configs) == ["seed", "n_envs", "agent.gamma", "device", "vec_env.mode"]


def test_short_name_is_the_last_part_of_a_key_if_no_other_key_has_it() -> None:
    keys = ["seed", "agent.gamma", "network._target_", "env.kwargs.size", "network.size"]

    assert list(short_names(keys).values()) == [
        *("seed", "gamma", "network", "env.kwargs.size", "network.size"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1e-4, "0.0001"),
        (0.1 + 0.2, "0.3"),
        ([64, 64], "[64,64]"),
        ("x" * 40, "x" * 29 + "…"),
    ],
)
def test_values_are_short_and_look_as_on_the_command_line(value: Any, shown: str) -> None:
    assert shown_value({"a": value}, "a") == shown


def test_class_is_shown_without_its_module_and_a_missing_key_as_a_dash() -> None:
    assert (
        shown_value({"network._target_": "ml_pipeline.networks.MLP"}, "network._target_") == "MLP"
    )
    algorithm = {"agent.algorithm": "ml_pipeline.algorithms.dqn.algorithm.DQN"}
    assert shown_value(algorithm, "agent.algorithm") == "DQN"
    assert shown_value({}, "network._target_") == "-"


def test_extra_columns_fill_the_width_exactly() -> None:
    needed = {"run": ["a/b/c"]}
    extra = {"a": ["123"], "long": ["1234567"], "b": ["x"]}

    # 5 characters, and each further column has a gap of 2: a takes 5, long 9, b 3.
    for width, hidden in ((5, ["a", "long", "b"]), (10, ["long", "b"]), (13, ["long"]), (22, [])):
        columns, others = fitted(needed, extra, width)
        assert others == hidden
        assert list(columns) == ["run", *(title for title in extra if title not in hidden)]
        assert max(map(len, table_lines(columns))) <= width
    assert table_lines(columns) == ["run      a     long  b", "a/b/c  123  1234567  x"]


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("x", ["run  name", "a    x", "b    y"]),
        ("実験", ["run  name", "a    実験", "b    y"]),
        ("x\ny\tz", ["run  name", "a    x y z", "b    y"]),
        ("\x1b[2J", ["run  name", "a    \ufffd[2J", "b    y"]),
    ],
    ids=["one line", "wide characters", "two lines", "escape"],
)
def test_rows_of_a_table_stay_together(cell: str, lines: list[str]) -> None:
    columns, hidden = fitted({"run": ["a", "b"]}, {"name": [cell, "y"], "z": ["1", "2"]}, width=10)

    assert hidden == ["z"]
    assert table_lines(columns) == lines


def test_wide_characters_take_two_places() -> None:
    columns, _ = fitted({"run": ["実験", "e\u0301"]}, {"seed": ["1", "12"]}, width=10)

    assert table_lines(columns) == ["run   seed", "実験     1", "e\u0301       12"]
