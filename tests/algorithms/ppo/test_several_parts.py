"""PPO with Tuple and Dict actions: runs, workers, masks, predictions and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_rows, small
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_agents import Played, agent_in
from stopped_runs import checkpoint_numbers

from ml_pipeline import load, train
from ml_pipeline.__main__ import main
from ml_pipeline.assembly.compose import ConfigError
from ml_pipeline.envs.tasks.lanes import Lanes
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.errors import UserError
from ml_pipeline.runs.loggers import read_metrics

LANES = [*small(), "env=lanes", "+env.kwargs.length=8"]
FEW = ["network.hidden_sizes=[8]"]


class Deep(gym.Wrapper[Any, Any, Any, Any]):
    """Lanes with a tuple in a dict, and masks in the form of the space or in the observation."""

    def __init__(self, env: Any, masks: str = "parts") -> None:
        super().__init__(env)
        lane, speed = env.action_space["lane"], env.action_space["speed"]
        gear = spaces.MultiDiscrete([2, 3])
        self.action_space = spaces.Dict({"drive": spaces.Tuple((speed, lane)), "gear": gear})
        self._masks = masks
        if masks == "obs":
            parts = {"action_mask": spaces.MultiBinary(9), "limits": env.observation_space}
            self.observation_space = spaces.Dict(parts)

    def reset(self, **arguments: Any) -> Any:
        return self._seen(*self.env.reset(**arguments))

    def step(self, action: Any) -> Any:
        if action["gear"][0]:
            raise ValueError("gear 1 is forbidden")
        speed, lane = action["drive"]
        assert action in self.action_space
        obs, reward, *flags, info = self.env.step({"lane": lane, "speed": speed})
        obs, info = self._seen(obs, info)
        return obs, reward, *flags, info

    def _seen(self, obs: Any, info: Any) -> Any:
        lanes = info["action_mask"]["lane"]
        parts = {"drive": (None, lanes), "gear": (np.array([1, 0]), np.ones(3))}
        flat = np.concatenate([lanes, [1, 0, 1, 1, 1]]).astype(np.int8)
        if self._masks == "obs":
            return {"limits": obs, "action_mask": flat}, {}
        return obs, {"action_mask": parts if self._masks == "parts" else flat}


def wrapped(target: str, **options: Any) -> str:
    given = {"_target_": target, **options}
    return f"+env.wrappers.mine={{{', '.join(f'{k}: {v}' for k, v in given.items())}}}"


DQN = ["agent=dqn", "env=cartpole", "agent.learning_starts=16", "agent.batch_size=8"]


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("run", [["env=cartpole"], ["env=pendulum"], DQN], ids=" ".join)
def test_one_part_trains_bit_for_bit_like_the_action_itself(
    here: Path, run: list[str], as_dict: bool
) -> None:
    own = [each for each in small() if run is not DQN or not each.startswith("agent")]
    settings = [*own, *run, "agent.fast=off", *FEW]

    alone = train(settings).run_dir
    one = train([*settings, wrapped("tiny_envs.OnePart", as_dict=as_dict)]).run_dir

    assert read_rows(one) == read_rows(alone)
    ours, theirs = (weights(each) for each in (one, alone))
    assert len(ours) == len(theirs)
    assert ours == theirs


def weights(run: Path) -> list[Any]:
    found = checkpoint_numbers(run)
    return [found[name] for name in found if name.startswith("['agent']['model']")]


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_workers_and_shared_memory_give_the_run_of_one_process(here: Path, network: str) -> None:
    settings = [*LANES, f"network={network}", wrapped("test_several_parts.Deep")]
    workers = ["vec_env.n_workers=2", "vec_env.start_method=fork"]

    rows = [
        read_rows(
            train([*settings, f"vec_env={mode}", *(workers if mode != "serial" else [])]).run_dir
        )
        for mode in ("serial", "parallel", "shared")
    ]

    assert len(rows[0]) == 2
    assert rows[1] == rows[2] == rows[0]


def test_masks_of_all_forms_train_the_same_policy(here: Path) -> None:
    runs = [
        train([*LANES, *FEW, wrapped("test_several_parts.Deep", masks=form)]).run_dir
        for form in ("parts", "flat")
    ]

    assert weights(runs[0]) == weights(runs[1])
    seen = train(
        [*LANES, *FEW, wrapped("test_several_parts.Deep", masks="obs")]
    )  # the env refuses forbidden actions
    assert seen.env_steps == 64


def test_rollout_in_gymnasiums_own_vector_env_is_the_same() -> None:
    made = partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP), SerialEnv
    rollouts = []
    for make in made:
        env = make([Lanes] * 3)
        played = Played(env, 40, agent_in(env, action_mask="info"))
        played.collect()
        rollouts.append(played.buffer)

    for name in ("action", "reward", "terminated", "action_mask"):
        ours, theirs = (getattr(each, name) for each in rollouts)
        assert np.array_equal(ours, theirs), name


def test_predict_returns_what_the_env_takes(here: Path) -> None:
    run = train([*LANES, *FEW, wrapped("test_several_parts.Deep")]).run_dir
    policy, env = load(run), Deep(Lanes())
    obs, info = env.reset(seed=1)
    mask = info["action_mask"]

    for deterministic in (True, False):
        action = policy.predict(obs, deterministic=deterministic, action_mask=mask)
        assert action in env.action_space
        env.step(action)
    many = policy.predict(np.stack([obs, obs]), action_mask=np.ones((2, 9), dtype=bool))

    assert many["drive"][0].shape == (2, 1)
    assert many["gear"].shape == (2, 2)
    assert [each.tolist() for each in many["drive"]] == [
        [each.tolist()] * 2 for each in policy.predict(obs, action_mask=np.ones(9))["drive"]
    ]
    assert policy.predict(np.zeros((0, 4)), action_mask=np.ones((0, 9)))["gear"].shape == (0, 2)
    with pytest.raises(ValueError, match=r"must have 9 entries, got shape \(4,\)"):
        policy.predict(obs, action_mask={"drive": (None, np.ones(4))})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["env=lanes", "agent.box_policy=gsde"], "agent.box_policy=gsde: needs Box actions"),
        (["agent=sac", "env=lanes"], "action space Dict"),
        (["agent=dqn", "env=lanes"], "action space Dict"),
    ],
)
def test_what_several_parts_do_not_support_is_refused(
    here: Path, settings: list[str], words: str
) -> None:
    with pytest.raises((ConfigError, UserError), match=words):
        train([*settings, "device=cpu", "logger=none"])

    assert not list(here.iterdir())


def test_check_env_is_ready_and_names_the_part_of_wide_bounds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forked = ["vec_env.start_method=fork", "--seconds", "0.1"]
    parts = wrapped("tiny_envs.OnePart", as_dict=True)

    assert main(["check-env", "ml_pipeline.envs.tasks.lanes.Lanes", *forked]) == 0
    lanes = capsys.readouterr().out
    wide = ["staged_envs.Bounded", "+env.kwargs.bound=200.0", parts]
    assert main(["check-env", *wide, *forked]) == 0
    bounded = capsys.readouterr().out

    assert lanes.endswith("ready to train\n")
    assert "remark: actions/only go from -200 to 200, but agent.box_policy=gaussian" in bounded


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lanes_are_learned_which_needs_both_parts(here: Path) -> None:
    settings = ["experiment=lanes", "seed=1", "total_steps=20_480", "logger=none", "device=cpu"]
    run = train(settings).run_dir

    last = read_metrics(run / "metrics.csv")[-1]

    # 32 is the best; the right lane at any fixed speed gets 26, the right speed in any lane 27.
    assert float(last["eval/episode_return"]) >= 30.0


def test_entropy_and_actions_of_both_parts_reach_the_loss(here: Path) -> None:
    """The mean entropy is that of four lanes, of which two are open, and of one speed."""
    run = train([*LANES, *FEW, "agent.learning_rate=1e-9", "agent.log_std_init=-1.0"]).run_dir

    entropy = float(read_rows(run)[0]["policy/entropy"])

    gaussian = -1.0 + 0.5 * np.log(2 * np.pi * np.e)
    assert entropy == pytest.approx(np.log(2) + gaussian, abs=1e-3)
    saved = torch.load(run / "checkpoints" / "latest.pt", weights_only=True)["agent"]["spaces"]
    assert saved["action_space"]["kind"] == "Dict"
