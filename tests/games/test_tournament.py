"""Games through the door: tournament, evaluate --opponent, play --opponent, and their mistakes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Capture, error_line, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.players import chosen_env, env_of, load_player, open_arena
from ml_pipeline.assembly.run import train

ENV = ["env.target=two_player_games.TugOfWar", "+env.kwargs.opponent=weak"]
LONGER = small(agent__n_steps=64, total_steps=512, agent__learning_rate=0.01)
REPLAY = [
    *("n_envs=2", "device=cpu", "logger=none", "total_steps=64", "vec_env=serial"),
    *("agent.learning_starts=32", "agent.batch_size=8", "agent.iteration_length=8"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of PPO, PPO with an LSTM, and DQN with discrete actions; copied, never changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train([*LONGER, *ENV, "run_root=ppo"])
        train([*small(), *ENV, "run_root=lstm", "network=lstm"])
        train(["agent=dqn", *REPLAY, *ENV, "+env.kwargs.discrete=true", "run_root=dqn"])
        for root in ("ppo", "lstm", "dqn"):
            (run,) = Path(root).glob("TugOfWar/*")
            run.rename(f"{root}_run")
    return folder


@pytest.fixture
def runs(trained: Path, here: Path) -> Path:
    """The current folder, with the runs ppo_run, lstm_run and dqn_run."""
    for name in ("ppo_run", "lstm_run", "dqn_run"):
        shutil.copytree(trained / name, here / name)
    return here


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_tournament_rates_runs_and_scripted_opponents(runs: Path, capsys: Capture) -> None:
    players = ["ppo_run", "lstm_run", "dqn_run", "weak", "basic"]

    text = printed(capsys, "tournament", *players, "--games", "10", "--out", "out")

    assert "TugOfWar: 5 players, 10 games per pair, sampled actions" in text
    assert "weak - strong: wins 0, draws 0, losses 10" in text
    results = json.loads(Path("out/results.json").read_text())
    assert [results[key] for key in ("env", "seed", "games_per_pair")] == ["TugOfWar", 0, 10]
    ranked = [each["player"] for each in results["players"]]
    assert sorted(ranked) == ["dqn_run", "lstm_run", "ppo_run", "strong", "weak"]
    assert ranked[0] == "strong"  # no one can pull harder
    for each in results["players"]:
        assert each["wins"] + each["draws"] + each["losses"] == 40
        assert each["low"] <= each["rating"] <= each["high"]
    with Path("out/games.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20  # ten pairs, both sides
    assert {sum(int(row[key]) for key in ("wins", "draws", "losses")) for row in rows} == {5}
    assert {row["losses"] for row in rows if row["player_0"] == "strong"} == {"0"}
    assert {row["wins"] for row in rows if row["player_1"] == "strong"} == {"0"}
    for name in ("ratings.png", "win_matrix.png"):
        assert (Path("out") / name).read_bytes()[:4] == b"\x89PNG"
    page = Path("out/tournament.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)  # loads nothing
    assert "<td>ppo_run</td>" in page


@pytest.mark.slow
def test_tournament_gives_the_same_results_again(runs: Path, capsys: Capture) -> None:
    command = ("tournament", "ppo_run", "lstm_run", "--games", "20", "--env", "ppo_run")

    first, again = (printed(capsys, *command, "--out", "out", "--seed", "5") for _ in range(2))

    assert first == again


def test_the_anchor_has_1000_points(runs: Path, capsys: Capture) -> None:
    text = printed(
        capsys,
        *("tournament", "weak", "strong", "--env", "ppo_run", "--games", "2", "--out", "out"),
        *("--anchor", "weak"),
    )

    assert re.search(r"weak +1000 +1000 to 1000 +2 +0 +0 +2", text)
    assert "strong has won all of its games: its rating is a lower bound" in text
    assert "weak has lost all of its games: its rating is an upper bound" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ppo_run"], "ppo_run: one player; name two or more"),
        (["weak", "strong"], "weak strong: none of them is a run"),
        (["ppo_run", "weka"], "weka: neither a run folder nor an opponent of TugOfWar (weak, "),
        (["ppo_run", "weka"], "; did you mean weak"),
        (["ppo_run", "nowhere/at_all"], "nowhere/at_all: neither a run folder nor an opponent"),
        (["ppo_run", "ppo_run/"], "ppo_run/: the same player as ppo_run; name each player once"),
        (["strong", "ppo_run", "basic"], "basic: the same player as strong; name each player once"),
        (["cart", "ppo_run"], "CartPole-v1 is not a two-player env: Box("),
        (["ppo_run", "cart"], "CartPole-v1 is not a two-player env: Box("),
        (["ppo_run", "weak", "--anchor", "strong"], "--anchor strong: not one of the players"),
        (["ppo_run", "weak", "--env", "hokey"], "env=hokey: no such option"),
        (["ppo_run", "wide_run"], "wide_run: its player sees Box("),
        (["ppo_run", "broken"], "broken is not a run folder: it has no config.yaml"),
    ],
)
def test_mistakes_are_one_line(
    runs: Path, finished_run: Path, capsys: Capture, arguments: list[str], words: str
) -> None:
    finished_run.rename("cart")
    Path("broken").mkdir()
    shutil.copytree("ppo_run", "wide_run")
    config = Path("wide_run/config.yaml")
    config.write_text(config.read_text().replace("games.TugOfWar", "games.WideTugOfWar"))

    assert main(["tournament", *arguments, "--trust"]) == 1

    # The edited config has a line of its own before it.
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not Path("runs/tournaments").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tournament", "a", "b", "--games", "1"], "--games: must be an integer of at least 2"),
        (["evaluate", "a", "--games", "1", "--opponent", "weak"], "must be an integer of at least"),
    ],
)
def test_too_few_games_are_refused(capsys: Capture, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments)

    assert words in error_line(capsys)


def test_folder_of_someone_else_needs_trust(runs: Path, capsys: Capture) -> None:
    config = Path("ppo_run/config.yaml")
    config.write_text(config.read_text() + "# changed\n")
    command = ["tournament", "ppo_run", "weak", "--games", "2", "--out", "out"]

    assert main(command) == 1
    assert "env.target=two_player_games.TugOfWar: is not a part of" in error_line(capsys)
    assert main([*command, "--trust"]) == 0


def test_evaluate_against_an_opponent_prints_wilson_intervals(runs: Path, capsys: Capture) -> None:
    text = printed(capsys, "evaluate", "ppo_run", "--opponent", "basic", "--games", "100")

    lines = text.splitlines()
    origin = "checkpoint best of env step 512"
    assert lines[0] == f"ppo_run ({origin}) against strong (scripted)"
    assert re.fullmatch(r"TugOfWar, 100 games from seed \d+, sampled actions", lines[1])
    # No one pulls harder than strong. With z = 1.96, the upper end is z^2 / (100 + z^2).
    assert lines[2] == "wins         0    0.0%  (95 % interval 0.0% to 3.7%)"
    assert [line.split(":")[0] for line in lines[5:7]] == ["as player 0", "as player 1"]


def test_many_draws_get_a_remark(runs: Path, capsys: Capture) -> None:
    text = printed(
        capsys, "evaluate", "ppo_run", "--opponent", "ppo_run", "--games", "10", "--deterministic"
    )

    assert re.search(r"draws +10 +100.0%", text)
    assert text.splitlines()[-1].startswith("most games are draws: standing still also draws")


@pytest.mark.slow
def test_evaluate_plays_in_another_env_with_equal_spaces(runs: Path, capsys: Capture) -> None:
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/lucky.yaml").write_text(
        "target: two_player_games.TugOfWar\nkwargs:\n  opponent: weak\n  luck: 1.0\n"
    )

    games = printed(
        capsys, *("evaluate", "ppo_run", "--opponent", "strong", "--env", "lucky", "--games", "60")
    )
    episodes = printed(capsys, "evaluate", "ppo_run", "--env", "lucky", "--episodes", "30")

    wins = int(re.search(r"wins +(\d+)", games)[1])  # type: ignore[index]
    assert 6 <= wins <= 36  # 20 expected, by luck alone
    assert "min -1.0  max 1.0" in episodes
    assert main(["evaluate", "ppo_run", "--env", "cartpole"]) == 1
    assert "env CartPole-v1 has the space Box(" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--opponent", "stron"], "stron: neither a run folder nor an opponent of TugOfWar"),
        (["--games", "5"], "--games: needs two players; add --opponent, or use --episodes"),
        (["--opponent", "weak", "--episodes", "5"], "--episodes: with --opponent, set the number"),
        (["--opponent", "weak", "--checkpoint", "step_3"], "step_3"),
    ],
)
def test_mistakes_of_evaluate_are_one_line(
    runs: Path, capsys: Capture, arguments: list[str], words: str
) -> None:
    assert main(["evaluate", "ppo_run", *arguments]) == 1

    assert words in error_line(capsys)


def test_a_wrong_run_is_named_with_an_opponent_too(here: Path, capsys: Capture) -> None:
    for command in ("evaluate", "play"):
        assert main([command, "nowhere", "--opponent", "weak"]) == 1
        assert "nowhere is not a run folder: it does not exist" in error_line(capsys)


@pytest.mark.slow
def test_video_shows_one_game_per_side(runs: Path, capsys: Capture) -> None:
    pytest.importorskip("moviepy", reason="pip install moviepy")

    text = printed(capsys, "evaluate", "ppo_run", "--opponent", "lstm_run", "--video")

    videos = sorted(Path("ppo_run/videos").glob("*.mp4"))
    assert [path.name for path in videos] == [
        f"ppo_run-against-lstm_run-as-player-{side}-episode-0.mp4" for side in (0, 1)
    ]
    assert all(str(path) in text and path.stat().st_size > 500 for path in videos)
    assert "TugOfWar, 2 games" in text


def test_play_prints_the_result_of_each_game(runs: Path, capsys: Capture) -> None:
    text = printed(capsys, "play", "dqn_run", "--opponent", "strong", "--episodes", "2")

    lines = text.splitlines()
    assert lines[0] == "TugOfWar, dqn_run against strong, greedy actions"
    assert re.fullmatch(r"seed 1: (won|lost|drawn), return -?\d.\d, length \d+", lines[2])
    assert re.fullmatch(r"won \d, drawn \d, lost \d", lines[-1])


@pytest.mark.slow
def test_an_exported_policy_plays_greedily(runs: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    pytest.importorskip("onnxscript", reason="pip install onnxscript")
    assert main(["export", "ppo_run", "--format", "onnx"]) == 0
    capsys.readouterr()
    players = ["ppo_run/policy.onnx", "ppo_run", "--games", "2", "--out", "out"]

    assert main(["tournament", *players]) == 1
    assert error_line(capsys).endswith("an exported policy acts greedily; add --deterministic")
    text = printed(capsys, "tournament", *players, "--deterministic")

    assert "policy.onnx - ppo_run: wins 0, draws 2, losses 0" in text  # the same actions


@pytest.mark.parametrize("word", ["strong", "basic"])
def test_basic_is_another_name_for_strong_in_hockey(word: str) -> None:
    arena = open_arena(chosen_env("hockey"))

    assert load_player(word, arena, noise_seed=0).name == "strong"


def test_discrete_hockey_is_played_with_continuous_actions() -> None:
    env = chosen_env("hockey")
    env = replace(env, kwargs={**env.kwargs, "discrete": True})

    arena = open_arena(env)

    assert arena.spaces.action.shape == (4,)
    assert arena.make_env.kwargs["opponent"] is None
    assert load_player("weak", arena, noise_seed=0).origin == "scripted"


def test_players_of_equal_runs_draw_different_noise(runs: Path) -> None:
    arena = open_arena(env_of("ppo_run"))
    obs = np.zeros((50, 2), np.float32)

    def actions(seed: int) -> list[Any]:
        player = load_player("ppo_run", arena, noise_seed=seed)
        return player.policy.act_batch(obs).tolist()

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)


@pytest.mark.slow
def test_page_in_a_browser_shows_the_heat_map(runs: Path, browser: Any, capsys: Capture) -> None:
    printed(capsys, "tournament", "ppo_run", "weak", "strong", "--games", "4", "--out", "out")
    address = Path("out/tournament.html").resolve().as_uri()
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    page.goto(address)
    page.wait_for_selector("#ratings .main-svg")

    assert page.inner_text("h1") == "TugOfWar: tournament"
    cells = page.locator("#win_matrix .heatmap-label").all_inner_texts()
    assert len(cells) == 6
    assert page.locator("table").first.locator("tbody tr").count() == 3
    assert requested == [address]
    assert errors == []
