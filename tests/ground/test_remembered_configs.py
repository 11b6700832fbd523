"""The tests remember composed configs; these are the configs that Hydra composes."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from ml_pipeline.assembly.compose import ConfigError, compose_config


@pytest.mark.parametrize("words", [small(), ["experiment=pendulum", "~callbacks.evaluation"]])
def test_remembered_config_equals_a_composed_one(words: list[str]) -> None:
    changed = compose_config([*words, "agent.gamma=0.5", "+env.kwargs.more=1"])
    remembered = compose_config(words)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (config_loader_impl, "create_defaults_list"),
            (ConfigLoaderImpl, "_compose_config_from_defaults_list"),
        ):
            patch.setattr(owner, name, getattr(owner, name).__wrapped__)
        composed = compose_config(words)

    assert remembered == composed
    assert changed != composed


def test_changed_files_of_the_current_folder_are_read_again(here: Path) -> None:
    file = here / "conf" / "env" / "mine.yaml"
    file.parent.mkdir(parents=True)
    for name in ("CartPole-v1", "Acrobot-v1"):
        file.write_text(f"id: {name}\n")
        assert compose_config(["env=mine"]).env.id == name
    file.unlink()
    with pytest.raises(ConfigError, match="env=mine: no such option"):
        compose_config(["env=mine"])
