"""Loop: counts, calls callbacks and loggers in order, stops, and saves; with any trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ml_pipeline.records import Metrics
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.contracts import Callback
from ml_pipeline.training.loop import Loop


class ToyTrainer:
    """Twelve env steps per iteration; ``failing`` is the error of the second one."""

    def __init__(self, failing: Exception | None = None) -> None:
        self.agent: Any = "agent"
        self.envs: Any = ["envs"]
        self.iteration_steps = 12
        self.progress = -1.0
        self.failing = failing
        self.seen_progress: list[float] = []

    def train_episode_vectorized(self, hold: Callable[[], None] = lambda: None) -> Metrics:
        hold()
        self.seen_progress.append(self.progress)
        if self.failing is not None and len(self.seen_progress) == 2:
            raise self.failing
        return {"loss/toy": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"toy": len(self.seen_progress)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen_progress = [0.0] * state["toy"]


class Listener(Callback):
    """Records all calls; it is also a logger."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.logged: list[Metrics] = []
        self.stop_at = stop_at

    def on_train_start(self, loop: Loop) -> None:
        self.calls.append("start")

    def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
        self.calls.append(f"end {loop.iteration}")
        metrics["eval/episode_return"] = 5.0
        if loop.iteration == self.stop_at:
            loop.request_stop("enough")

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        self.calls.append(f"log {env_steps}")
        self.logged.append(dict(metrics))

    def on_iteration_logged(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"logged {loop.iteration}")

    def on_train_end(self, loop: Loop) -> None:
        self.calls.append("stop")

    def state_dict(self) -> dict[str, Any]:
        return {"n_calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = ["loaded"] * state["n_calls"]

    def close(self) -> None: ...


class Adds(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
        metrics["mine"] = self.value


def test_callbacks_and_loggers_are_called_in_order_until_a_callback_asks_to_stop() -> None:
    listener = Listener(stop_at=2)
    loop = Loop(ToyTrainer(), callbacks={"listener": listener}, loggers=[listener])

    loop.train(1_000)

    one = ["end 1", "log 12", "logged 1"]
    two = ["end 2", "log 24", "logged 2"]
    assert listener.calls == ["start", *one, *two, "stop"]
    assert loop.stop_reason == "enough"
    row = listener.logged[0]
    assert (row["iteration"], row["env_steps"], row["loss/toy"]) == (1, 12, 1.0)
    assert row["eval/episode_return"] == 5.0
    assert row["time/iteration_seconds"] > 0
    assert row["time/env_steps_per_second"] > 0


def test_the_trainer_gets_its_progress_until_an_iteration_reaches_the_total() -> None:
    trainer = ToyTrainer()
    loop = Loop(trainer)

    loop.train(40)

    assert trainer.seen_progress == [0.0, 0.3, 0.6, 0.9]
    assert (loop.iteration, loop.env_steps) == (4, 48)


@pytest.mark.parametrize("value", [np.float32(1.0), np.array(1), torch.tensor(1.0), True])
def test_a_metric_of_any_type_is_logged_as_a_plain_number(value: Any) -> None:
    listener = Listener()

    Loop(ToyTrainer(), callbacks={"mine": Adds(value)}, loggers=[listener]).train(1)

    assert (listener.logged[0]["mine"], type(listener.logged[0]["mine"])) == (1.0, float)


def test_a_metric_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(TrainingError, match="metric mine='many': must be a number"):
        Loop(ToyTrainer(), callbacks={"mine": Adds("many")}).train(1)


def test_a_training_error_names_the_iteration_which_does_not_count() -> None:
    loop = Loop(ToyTrainer(failing=TrainingError("epoch 1: not finite")))

    with pytest.raises(TrainingError, match=r"^iteration 2: epoch 1: not finite$"):
        loop.train(1_000)

    assert (loop.iteration, loop.env_steps) == (1, 12)


def test_an_interrupted_iteration_that_changed_the_weights_is_logged_once() -> None:
    class Interrupts(Callback):
        def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
            raise KeyboardInterrupt

    listener = Listener()
    callbacks = {"interrupts": Interrupts(), "listener": listener}

    with pytest.raises(KeyboardInterrupt):
        Loop(ToyTrainer(), callbacks=callbacks, loggers=[listener]).train(1_000)

    assert listener.calls == ["start", "log 12", "logged 1"]


def test_a_loaded_loop_continues_counting_and_loads_the_callbacks_it_still_has() -> None:
    def new(**callbacks: Callback) -> Loop:
        return Loop(ToyTrainer(), callbacks=callbacks)

    saved, kept = new(kept=Listener(), gone=Listener()), Listener()
    saved.train(24)
    loaded = new(kept=kept)

    loaded.load_state_dict(saved.state_dict())
    assert kept.calls == ["loaded"] * 6
    loaded.train(36)

    assert (loaded.iteration, loaded.env_steps) == (3, 36)
    assert loaded.trainer.state_dict() == {"toy": 3}


def test_a_trainer_may_lack_resizing_rollout_data_and_saved_episodes() -> None:
    loop = Loop(ToyTrainer(), saves_envs=True)

    assert (loop.agent, loop.envs) == ("agent", ["envs"])
    assert loop.last_rollout() == {}
    assert loop.env_snapshots() is None
    with pytest.raises(TypeError, match="ToyTrainer cannot change its number of envs"):
        loop.resize(3)
    with pytest.raises(ValueError, match="ToyTrainer cannot continue saved episodes"):
        loop.resume_episodes({}, [])
