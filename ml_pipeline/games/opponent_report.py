"""OpponentReport: lets copies of the agent join the opponent pool, and logs its results."""

from __future__ import annotations

from ml_pipeline.games.opponent_pool import AGENT, OpponentPool
from ml_pipeline.games.ratings import Pairing, points, results_of
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.training.contracts import Callback, RunningLoop

# Games between two ratings: a rating of n players takes a time that grows as n ** 3.
_LEAST_GAMES = 50
_GAMES_PER_PAIR = 0.05


class OpponentReport(Callback):
    """Metrics cover the games since the last copy joined; ratings cover all games of the run."""

    def __init__(self, pool: OpponentPool) -> None:
        self.pool = pool
        self._next_steps = int(pool.config.add_every_steps)  # when a copy may join
        self._n_rated = 0  # games of the run at the last rating
        self._rating: float | None = None

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        self.pool.between_iterations()
        wins, draws, losses = self.pool.results()
        n_games = wins + draws + losses
        metrics["opponents/pool_size"] = len(self.pool.selves)
        if n_games:
            metrics["opponents/games"] = n_games
            metrics["opponents/win_rate"] = wins / n_games
            metrics["opponents/draw_rate"] = draws / n_games
            metrics["opponents/loss_rate"] = losses / n_games
        for name, member in self.pool.scripted.items():
            if sum(member.results):
                metrics[f"opponents/{name}_win_rate"] = member.results[0] / sum(member.results)
        if (rating := self._rated(n_games)) is not None:
            metrics["opponents/rating"] = rating
        if loop.env_steps < self._next_steps or loop.is_last_iteration():
            return
        wanted = self.pool.config.add_at_score
        if wanted is None or (n_games and (wins + 0.5 * draws) / n_games >= wanted):
            self._add(loop)

    def _add(self, loop: RunningLoop) -> None:
        self.pool.add(loop.agent.greedy(), loop.env_steps)
        self._next_steps = loop.env_steps + int(self.pool.config.add_every_steps)

    def _rated(self, n_games: int) -> float | None:
        """The agent's rating; the first player has 1000 points."""
        n_all = sum(sum(results) for results in self.pool.games.values())
        n_players = len({name for names in self.pool.games for name in names})
        wanted = self._n_rated + max(_LEAST_GAMES, _GAMES_PER_PAIR * n_players**2)
        if n_all < wanted or not n_games:
            return self._rating
        games = [Pairing(*names, *results) for names, results in self.pool.games.items()]
        found = points(results_of(games), anchor=self.pool.anchor)
        self._n_rated, self._rating = n_all, found[AGENT]
        return self._rating

    def on_train_end(self, loop: RunningLoop) -> None:
        wins, draws, losses = self.pool.results()
        say(f"last games against the pool: {wins} won, {draws} drawn, {losses} lost")

    def state_dict(self) -> StateDict:
        return {
            "pool": self.pool.state_dict(),
            "next_steps": self._next_steps,
            "n_rated": self._n_rated,
            "rating": self._rating,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.pool.load_state_dict(state["pool"])
        self._next_steps, self._n_rated = state["next_steps"], state["n_rated"]
        self._rating = state["rating"]
