"""tournament: let runs and scripted opponents play each other, and rate them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import (
    ENV_HELP,
    MOST_GAMES,
    add_results,
    add_shared,
    check_actions,
    chosen_run,
    dated_folder,
    integer,
    show_results,
)
from ml_pipeline.errors import UserError

if TYPE_CHECKING:
    from ml_pipeline.assembly.players import Arena, Player
    from ml_pipeline.games.tournament import Match

HELP = "let runs and scripted opponents play each other, and rate them"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "players",
        nargs="+",
        metavar="PLAYER",
        help="run folder, checkpoint, exported policy, latest, or a scripted opponent of the env, "
        "such as weak or strong",
    )
    parser.add_argument(
        "--games", type=integer(2), default=200, metavar="N", help="of each pair; default: 200"
    )
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="default: 0")
    add_shared(parser, "--deterministic")
    parser.add_argument(
        "--env",
        metavar="NAME_OR_RUN",
        help=f"{ENV_HELP}; default: that of the first run",
    )
    parser.add_argument(
        "--anchor", metavar="PLAYER", help="give this player 1000 points; default: their mean"
    )
    add_results(parser, "tournaments/<env>")
    add_shared(parser, "--root", "--trust")


def run(options: Namespace) -> None:
    import torch

    from ml_pipeline.device import torch_threads
    from ml_pipeline.games import tournament
    from ml_pipeline.games.tournament_report import write_report
    from ml_pipeline.runs.console import wide_console

    arena, players = _loaded(options)
    anchor = _anchor(options.anchor, players)
    actions = "greedy" if options.deterministic else "sampled"
    n_games = options.games
    print(f"{arena.name}: {len(players)} players, {n_games} games per pair, {actions} actions")
    with torch_threads(torch.device("cpu")):
        matches = [_played(arena, *pair, options) for pair in combinations(players.values(), 2)]
    facts = {"seed": options.seed, "games_per_pair": n_games, "actions": actions}
    result = tournament.rated(arena.name, facts, matches, anchor)
    console = wide_console()
    print()
    console.print(tournament.ratings_table(result.ratings))
    print("\nwins-draws-losses of the row against the column:")
    console.print(tournament.win_matrix_table(result.results))
    for line in tournament.remarks(result):
        print(line)
    folder = options.out or dated_folder("tournaments", arena.name)
    tournament.write_results(folder, result)
    show_results(folder, lambda folder: write_report(folder, result), opens=options.open)


def _loaded(options: Namespace) -> tuple[Arena, dict[str, Player]]:
    """The env, and the players by the words that name them."""
    from ml_pipeline.assembly.players import chosen_env, is_path, load_player, open_arena
    from ml_pipeline.seeding import stream_seed

    given = [chosen_run(each, options.root) for each in options.players]
    if len(given) < 2:
        raise UserError(f"{given[0]}: one player; name two or more, such as another run or weak")
    env = options.env or next(filter(is_path, given), None)
    if env is None:
        raise UserError(
            f"{' '.join(given)}: none of them is a run, which would name the env; add --env NAME"
        )
    arena = open_arena(chosen_env(chosen_run(env, options.root), trust=options.trust))
    players: dict[str, Player] = {}
    for each in given:
        seed = stream_seed(options.seed, f"actions of player {len(players)}")
        player = load_player(each, arena, noise_seed=seed, trust=options.trust)
        check_actions(player, deterministic=options.deterministic)
        same = next((word for word in players if _are_same(word, each, players, player)), None)
        if same is not None:
            raise UserError(f"{each}: the same player as {same}; name each player once")
        is_taken = player.name in (other.name for other in players.values())
        players[each] = player._replace(name=each) if is_taken else player
    return arena, players


def _are_same(word: str, other: str, players: dict[str, Player], player: Player) -> bool:
    if Path(word).exists() and Path(other).exists():
        return Path(word).samefile(other)
    return players[word].name == player.name


def _anchor(given: str | None, players: dict[str, Player]) -> str | None:
    from ml_pipeline.analysis.run_data import did_you_mean

    names = {word: player.name for word, player in players.items()}
    names |= {name: name for name in names.values()}
    if given is not None and given not in names:
        raise UserError(f"--anchor {given}: not one of the players{did_you_mean(given, [*names])}")
    return None if given is None else names[given]


def _played(arena: Arena, first: Player, second: Player, options: Namespace) -> Match:
    from ml_pipeline.games.matches import play_games
    from ml_pipeline.games.tournament import Match
    from ml_pipeline.seeding import stream_seed

    with closing(arena.make_envs(n_envs=min(options.games, MOST_GAMES))) as envs:
        games = play_games(
            first.policy,
            second.policy,
            envs,
            n_games=options.games,
            seed=stream_seed(options.seed, f"games of {first.name} and {second.name}"),
            deterministic=options.deterministic,
        )
    wins, draws, losses = games.counts
    line = f"{first.name} - {second.name}: wins {wins}, draws {draws}, losses {losses}"
    print(line, flush=True)
    return Match(first.name, second.name, games)
