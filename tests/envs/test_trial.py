"""The trial of an env before training: what it reports, refuses and survives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from conftest import Capture, small
from faulty_envs import GivenEnv
from gymnasium import spaces
from tiny_envs import BreakingEnv, CountingEnv, EndlessEnv, FaultyEnv, ForbiddingEnv, NoisyEnv

from ml_pipeline.__main__ import main
from ml_pipeline.assembly import plan
from ml_pipeline.assembly.run import train
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.factory import EnvError
from ml_pipeline.envs.trial import in_worker, slow_trial, try_env
from ml_pipeline.runs.console import say_if_slow

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_a_trial_reports_the_spaces_the_masks_and_the_ends() -> None:
    counting = try_env(CountingEnv, "counting", least_steps=5)
    masked = try_env(ForbiddingEnv, "masked", mask_key="action_mask")

    assert counting.observation_space == CountingEnv().observation_space
    assert counting.has_ended
    assert counting.n_steps >= 5
    assert counting.remarks == []
    assert counting.no_snapshot is None
    assert (list(counting.info), list(masked.info)) == ([], ["action_mask"])
    assert not try_env(EndlessEnv, "endless", least_steps=50).has_ended


@pytest.mark.parametrize(
    ("space", "obs", "remark"),
    [
        (BOX, np.array([0.0, 3.0], np.float32), "the value 3, but its space has the bounds -1 to"),
        (BOX, np.array([0.0, 0.5]), "dtype float64, but its space has dtype float32"),
        (
            spaces.Dict({"a": spaces.Tuple([BOX, spaces.Box(0, 9, (), np.int64)])}),
            {"a": (np.zeros(2, np.float32), np.int64(-2))},
            "observation['a'][1] has the value -2, but its space has the bounds 0 to 9",
        ),
    ],
)
def test_an_observation_that_barely_fits_gets_one_remark(space: Any, obs: Any, remark: str) -> None:
    trial = try_env(partial(GivenEnv, space, obs), "given", least_steps=10)

    assert len(trial.remarks) == 1
    assert remark in trial.remarks[0]
    assert try_env(NoisyEnv, "noisy", least_steps=50).remarks == []


@pytest.mark.parametrize(
    ("space", "obs", "words"),
    [
        (BOX, np.zeros(3, np.float32), r"shape \(3,\), but its observation space has shape \(2,\)"),
        (spaces.Discrete(3), 7, r"observation is 7, which is not in Discrete\(3\)"),
        (spaces.Dict({"a": BOX}), np.zeros(2), r"an observation with the keys \['a'\]"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(space: Any, obs: Any, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        try_env(partial(GivenEnv, space, obs), "given")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("reward", "ValueError: the reward of step 4 is inf, not finite"),
        ("obs", "ValueError: observation has the value nan, not finite"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_unless_training_skips_it(
    what: str, words: str
) -> None:
    breaking = partial(BreakingEnv, what)

    with pytest.raises(EnvError, match=words):
        try_env(breaking, "breaking", least_steps=5)
    assert try_env(breaking, "breaking", least_steps=5, allow_nonfinite=True).remarks == []


class ReturningEnv(CountingEnv):
    """Returns ``from_reset`` and ``from_step`` instead of the right values, unless None."""

    from_reset: ClassVar[Any] = None
    from_step: ClassVar[Any] = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        right = super().reset(seed=seed, options=options)
        return right if self.from_reset is None else self.from_reset

    def step(self, action: Any) -> Any:
        right = super().step(action)
        return right if self.from_step is None else self.from_step(*right)


@pytest.mark.parametrize(
    ("attribute", "wrong", "words"),
    [
        ("from_reset", np.zeros(3), "reset must return obs, info; got one ndarray"),
        ("from_reset", (0, []), "info must be a dict, got 0 values"),
        (
            "from_step",
            lambda o, r, *more: (o, r, False, {}),
            "step must return obs, reward, terminated, truncated, info; got 4 values: ",
        ),
        ("from_step", lambda *right: "no", "truncated, info; got one str"),
        ("from_step", lambda o, r, *more: (o, None, *more), "returned reward=None"),
        ("from_step", lambda o, r, *more: (o, np.zeros(2), *more), "returned reward=array"),
        ("from_step", lambda o, r, t, *more: (o, r, None, *more), "terminated=None, which is not"),
        ("from_step", lambda o, r, t, *more: (o, r, "x", *more), "terminated='x', which is not"),
        ("from_step", lambda o, r, t, u, i: (o, r, t, u, 3), "info must be a dict, got one int"),
        ("from_step", lambda o, *more: (np.zeros((9, 9)), *more), r"observation of shape \(9, 9\)"),
    ],
)
def test_wrong_return_value_names_the_method_and_its_line(
    attribute: str, wrong: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReturningEnv, attribute, staticmethod(wrong) if callable(wrong) else wrong)
    method = attribute.removeprefix("from_")
    place = rf"\(test_trial.py:\d+ in ReturningEnv.{method}\)"

    with pytest.raises(EnvError, match=f"failed in its trial before training: .*{words}.*{place}"):
        try_env(ReturningEnv, "wrong")
    with pytest.raises(EnvError, match=place):  # not the wrapper, which only passes it on
        try_env(lambda: gym.Wrapper(ReturningEnv()), "wrapped")


class NoObservation(gym.ObservationWrapper[Any, Any, Any]):
    pass


class NoReward(gym.RewardWrapper[Any, Any]):
    pass


class NoAction(gym.ActionWrapper[Any, Any, Any]):
    pass


class NoStep(gym.Env[Any, Any]):
    observation_space, action_space = BOX, spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}


class NoReset(gym.Env[Any, Any]):
    observation_space, action_space = BOX, spaces.Discrete(2)


class NoSeed(NoStep):
    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32), {}


class ObservesNothing(gym.ObservationWrapper[Any, Any, Any]):
    def observation(self, observation: Any) -> Any:
        return None


class RewardsNothing(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoObservation(CountingEnv()), r"\(.*: NoObservation has no method observation\)"),
        (lambda: NoReward(CountingEnv()), r"\(.*: NoReward has no method reward\)"),
        (lambda: NoAction(CountingEnv()), r"\(.*: NoAction has no method action\)"),
        (NoStep, r"\(test_trial.py:\d+: NoStep has no method step\)"),
        (NoReset, "TypeError: NoReset has no method reset"),
        (NoSeed, r"keyword argument 'seed' \(test_trial.py:\d+ in NoSeed.reset\)"),
        (lambda: ObservesNothing(CountingEnv()), r"\(.*:\d+ in ObservesNothing.observation\)"),
        (lambda: RewardsNothing(CountingEnv()), r"reward=None.* \(.* in RewardsNothing.reward\)"),
        (
            lambda: gym.Wrapper(RewardsNothing(gym.Wrapper(CountingEnv()))),
            r"\(test_trial.py:\d+ in RewardsNothing.reward\)",
        ),
    ],
)
def test_missing_or_wrong_method_is_named_with_its_class(make: Any, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        try_env(make, "incomplete")


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_space_that_is_not_a_space_is_refused(name: str) -> None:
    def make() -> Any:
        env = CountingEnv()
        setattr(env, name, 2)
        return env

    with pytest.raises(EnvError, match=f"{name} is 2; set it to a space of gymnasium.spaces"):
        try_env(make, "spaceless")


def test_the_error_of_an_env_names_its_line() -> None:
    faulty = partial(FaultyEnv, "raise", 0)

    with pytest.raises(EnvError, match=r"LookupError: puck left the table \(tiny_envs.py:\d+ in"):
        try_env(faulty, "faulty", least_steps=5)
    with pytest.raises(EnvError, match=r"LookupError: puck left the table \(tiny_envs.py:\d+ in"):
        in_worker(partial(try_env, faulty, "faulty", least_steps=5), "faulty", VecEnvConfig())


@pytest.mark.parametrize(
    ("fault", "words"),
    [("exit", "ended with exit code 7"), ("hang", "has not answered within 1.0 s and was killed")],
)
def test_a_crash_or_a_hang_in_the_trial_does_not_reach_the_main_process(
    here: Path, fault: str, words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "say_if_slow", partial(say_if_slow, seconds=0.5))
    kwargs = [f"+env.kwargs.fault={fault}", "+env.kwargs.culprit=0"]
    parallel = ["vec_env=parallel", "vec_env.step_timeout_seconds=1.0"]

    with pytest.raises(EnvError, match=f"env FaultyEnv failed in its trial.*{words}"):
        train([*small(), "env.target=tiny_envs.FaultyEnv", *kwargs, *parallel])
    if fault == "hang":
        line = "takes long; an env that hangs is killed after 1 s (vec_env.step_timeout_seconds)"
        assert line in capsys.readouterr().out
    assert list(here.iterdir()) == []


def test_line_about_a_slow_trial_in_this_process_says_how_to_end_it() -> None:
    line = slow_trial("Slow", VecEnvConfig(), in_worker=False)

    assert line.endswith(
        "if it hangs, press Ctrl-C; with vec_env=parallel, it is killed after 300 s "
        "(vec_env.step_timeout_seconds)"
    )
    never = VecEnvConfig(step_timeout_seconds=None)
    assert slow_trial("Slow", never, in_worker=True).endswith("if it hangs, press Ctrl-C")


def test_an_env_that_fails_while_it_is_timed_leaves_no_run_folder(here: Path) -> None:
    kwargs = ["+env.kwargs.fault=raise", "+env.kwargs.culprit=0"]

    with pytest.raises(EnvError, match="env FaultyEnv failed in its trial before training"):
        train([*small(), "env.target=tiny_envs.FaultyEnv", *kwargs, "vec_env=auto"])
    assert list(here.iterdir()) == []


def test_check_env_prints_facts_remarks_and_faults(here: Path, capsys: Capture) -> None:
    forked = "vec_env.start_method=fork"  # starts faster
    assert main(["check-env", "tiny_envs.UnseededEnv", forked, "--seconds", "0.1"]) == 0
    endless = capsys.readouterr().out
    faulty = ["tiny_envs.FaultyEnv", "+env.kwargs.fault=exit", "+env.kwargs.culprit=0"]
    assert main(["check-env", *faulty, forked]) == 1
    crashed = capsys.readouterr().err
    assert main(["check-env", "CartPole-v9", forked]) == 1

    assert "action space:      Discrete(2)" in endless
    assert "remark: no episode ended within" in endless
    assert "remark: Gymnasium's check_env: AssertionError: Expects the random number" in endless
    assert endless.endswith("ready to train, with 2 remarks\n")
    assert "fault: env FaultyEnv failed in its trial" in crashed
    assert "did you mean CartPole-v1" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_check_env_and_ppo_say_that_bounds_are_far_from_1(here: Path, capsys: Capture) -> None:
    wide, forked = "+env.kwargs.bound=200.0", "vec_env.start_method=fork"
    name, env = "staged_envs.Bounded", ["env.target=staged_envs.Bounded", "env.id=null"]

    assert main(["check-env", name, wide, forked, "--seconds", "0.1"]) == 0
    checked = capsys.readouterr().out
    assert main(["check-env", name, forked, "--seconds", "0.1"]) == 0
    unit = capsys.readouterr().out
    train([*small(), *env, wide])
    trained = capsys.readouterr().out
    train([*small(), *env, wide, "agent.box_policy=squashed"])
    squashed = capsys.readouterr().out

    assert "remark: actions go from -200 to 200, but agent.box_policy=gaussian" in checked
    assert "actions go from -200 to 200, but the first ones have" in trained
    assert not any("actions go from" in text for text in (unit, squashed))
