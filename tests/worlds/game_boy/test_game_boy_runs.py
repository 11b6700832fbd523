"""Runs with Game Boy games: PPO learns, and the preset runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import read_rows, summary_of
from game_boy_roms import write_game

from ml_pipeline.assembly.run import train

COMMON = ("env=game_boy", "logger=none", "device=cpu", "n_envs=2", "~callbacks.evaluation")


def game(folder: Path, name: str) -> list[str]:
    return [f"env.kwargs.{key}={value}" for key, value in write_game(folder, name).items()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_learns_to_catch(here: Path) -> None:
    settings = ["env.kwargs.observation=memory", "env.kwargs.episode_length=64"]

    result = train([*COMMON, *game(here, "catch"), *settings, "total_steps=15360"])

    # Random actions give -1.4, and 1.4 without A.
    assert result.mean_reward > 14.0
    assert float(read_rows(result.run_dir)[-1]["rollout/info/lives"]) > 2.5


@pytest.mark.slow
def test_the_preset_of_pokemon_runs_with_the_test_rom(here: Path) -> None:
    small = ["n_envs=2", "total_steps=64", "agent.n_steps=16", "agent.n_minibatches=2"]
    settings = ["experiment=game_boy_pokemon", *game(here, "catch"), *small]
    settings += ["env.kwargs.episode_length=50"]

    run = train([*settings, "logger=none", "device=cpu"]).run_dir

    assert summary_of(run)["env_steps"] == 64
    assert len(read_rows(run)) == 2
