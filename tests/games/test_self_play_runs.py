"""Runs with opponent=self_play: games without scripted players, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.errors import UserError

TUG = ["env.target=two_player_games.TugOfWar", "+env.kwargs={opponent: strong, luck: 0.5}"]


def test_a_game_without_scripted_players_is_trained_and_rated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = ["opponent=self_play", "env.target=two_player_games.OnlyForTwo"]
    settings = [each for each in small(total_steps=128) if "evaluation" not in each]
    with pytest.raises(UserError, match="needs two players, also in evaluations"):
        train([*small(), *game])
    run = train([*settings, *game, "~callbacks.evaluation"]).run_dir
    with pytest.raises(UserError, match="needs two players; name the other one by --opponent"):
        load_agent(run)

    main(["evaluate", str(run), "--opponent", str(run), "--games", "10"])

    assert "10 games" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=cartpole"], "CartPole-v1 is not a two-player env"),
        (["env=torch_cartpole"], "TorchCartPole is not a two-player env"),
        (["+opponent.scripted.wek=0.5", *TUG], "wek: neither a run folder nor an opponent"),
        (["network=lstm", "agent.n_minibatches=1", *TUG], "cannot be recurrent"),
        (["opponent.sampling=best", *TUG], "opponent.sampling"),
        (
            ["+curriculum={phases: {a: {opponents: {wek: 1}}}}", *TUG],
            "curriculum.phases.a.opponents.wek: this env has no such player, only weak, strong",
        ),
    ],
)
def test_mistakes_are_refused_before_a_folder_exists(
    overrides: list[str], message: str, here: Path
) -> None:
    vec_env = ["vec_env=auto"] if "env=torch_cartpole" in overrides else []
    with pytest.raises(UserError, match=message):
        train([*small(), *vec_env, "opponent=self_play", *overrides])
    assert not (here / "runs").exists()
