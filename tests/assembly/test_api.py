"""``from ml_pipeline import train, load``."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Capture, call, small
from gymnasium import spaces

import ml_pipeline
from ml_pipeline import load, train
from ml_pipeline.__main__ import main
from ml_pipeline.assembly.arguments import as_overrides
from ml_pipeline.assembly.compose import ConfigError, plain_config, stored_config
from ml_pipeline.assembly.load import load_policy
from ml_pipeline.assembly.loaded_policy import LoadedPolicy, as_batch
from ml_pipeline.policy.observations import ObservationError


def test_configs_that_differ_only_in_the_seed_are_checked_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [train([*small(), f"seed={seed}"]).run_dir for seed in (11, 12)]
    other = train([*small(), "seed=12", "agent.gamma=0.9"]).run_dir
    expected = [plain_config(run) for run in (*runs, other)]
    monkeypatch.setattr("ml_pipeline.assembly.compose._configs", {})
    checked: list[Path] = []
    monkeypatch.setattr(
        "ml_pipeline.assembly.compose.stored_config",
        lambda run, **options: (checked.append(run.path), stored_config(run, **options))[1],
    )

    configs = [plain_config(run) for run in (*runs, other)]

    assert configs == expected
    assert [config["seed"] for config in configs] == [11, 12, 12]
    assert checked == [runs[0], other]


def test_at_most_some_configs_are_remembered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml_pipeline.assembly.compose._configs", remembered := {})
    monkeypatch.setattr("ml_pipeline.assembly.compose._MOST_CONFIGS", 2)
    run = train(small()).run_dir
    text = (run / "config.yaml").read_text()

    for gamma in (0.1, 0.2, 0.3, 0.4):
        (run / "config.yaml").write_text(text.replace("gamma: 0.99", f"gamma: {gamma}"))
        plain_config(run)

    assert [config.agent.gamma for config in remembered.values()] == [0.3, 0.4]


def test_reading_the_config_of_a_run_imports_no_torch(here: Path) -> None:
    run = train(small()).run_dir
    code = (
        "import sys; from ml_pipeline.assembly.compose import plain_config; "
        f"print(plain_config({str(run)!r})['agent']['algorithm'], 'torch' in sys.modules)"
    )

    result = call(sys.executable, "-c", code)

    assert result.stdout == "ml_pipeline.algorithms.ppo.algorithm.PPO False\n", result.stderr


@pytest.mark.parametrize("seed", ["-1", "2147483648"])
def test_seed_of_a_known_config_is_checked_too(here: Path, seed: str) -> None:
    run = train(small()).run_dir
    path = run / "config.yaml"
    text = path.read_text() + "# no signature\n"
    path.write_text(text)
    plain_config(run)
    path.write_text(text.replace("\nseed: 1\n", f"\nseed: {seed}\n"))

    with pytest.raises(ConfigError, match=f"seed={seed}: must be between 0"):
        plain_config(run)


def test_keyword_arguments_equal_override_strings(here: Path) -> None:
    by_words = train(small(seed=5), "agent.gamma=0.9", "+env.kwargs.sutton_barto_reward=true")
    by_keys = train(
        small(), seed=5, agent={"gamma": 0.9}, env={"kwargs": {"sutton_barto_reward": True}}
    )

    assert plain_config(by_words.run_dir) == plain_config(by_keys.run_dir)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (1e-4, "0.0001"),
        (True, "true"),
        (None, "null"),
        ("cartpole", "cartpole"),
        ("true", "'true'"),
        ("1e3", "'1e3'"),
        ("it's, a=b", r"'it\'s, a=b'"),
        ([64, 64], "[64,64]"),
        (Path("runs/x"), "runs/x"),
    ],
)
def test_values_are_written_as_hydra_reads_them(value: Any, text: str) -> None:
    assert list(as_overrides({"key": value})) == [f"key={text}"]


def test_own_yaml_files_are_found_in_the_config_dir_and_in_conf(here: Path) -> None:
    for path, text in (
        ("it's mine/env/mine.yaml", "{id: null, target: tiny_envs.CountingEnv}"),
        ("conf/network/wide.yaml", "{_target_: own_parts.Wide, width: 5}"),
    ):
        (here / path).parent.mkdir(parents=True)
        (here / path).write_text(text)

    run = train(small(), env="mine", network="wide", config_dir="it's mine", quiet=True).run_dir

    config = plain_config(run)
    assert config["env"]["target"] == "tiny_envs.CountingEnv"
    assert config["network"]["width"] == 5
    with pytest.raises(ConfigError, match=r"^config_dir=nowhere: no such folder$"):
        train(config_dir="nowhere")


def test_unknown_setting_is_one_line_that_names_a_similar_key(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.gamme.*did you mean agent\.gamma"):
        train(agent={"gamme": 0.9})


def test_quiet_run_prints_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(small(), quiet=True)

    assert capfd.readouterr().out == ""


def test_loaded_policy_predicts_for_one_observation_and_for_a_batch(here: Path) -> None:
    result = train(small(), quiet=True)
    obs = np.linspace(-0.2, 0.2, 12, dtype=np.float32).reshape(3, 4)
    policy = load(result.run_dir)

    actions = policy.predict(obs)

    assert load("latest").predict(obs).tolist() == actions.tolist()
    assert actions.tolist() == result.agent.act_batch(obs, True).tolist()
    assert [policy.predict(row) for row in obs] == actions.tolist()
    assert policy.action_space.contains(policy.predict(obs[0]))
    with pytest.raises(ValueError, match=r"obs has the shape \[5\]; expected \[4\], or \[n"):
        policy.predict(np.zeros(5))
    with pytest.raises(ValueError, match=r"obs has the value nan; it must be finite"):
        policy.predict([0.0, np.nan, 0.0, 0.0])


def test_loaded_policy_takes_dict_observations(here: Path) -> None:
    run = train("experiment=camera_and_flag", small(), quiet=True).run_dir
    policy = load(run)
    one = policy.observation_space.sample()
    two = {name: np.stack([leaf, leaf]) for name, leaf in one.items()}

    assert policy.predict(two).tolist() == [policy.predict(one)] * 2


def _mixed_run() -> Path:
    return train(small(), env={"target": "tiny_envs.MixedEnv", "id": None}, quiet=True).run_dir


def test_dict_observations_match_by_key_in_any_order_and_as_lists(here: Path) -> None:
    policy = load(_mixed_run())
    policy.observation_space.seed(0)
    one, other = (policy.observation_space.sample() for _ in range(2))
    action = policy.predict(one).tolist()

    for order in itertools.permutations(one):
        assert policy.predict({key: one[key] for key in order}).tolist() == action
    as_lists = {key: np.asarray(leaf).tolist() for key, leaf in one.items()}
    assert policy.predict(as_lists).tolist() == action
    assert policy.predict({**as_lists, "more": 1}).tolist() == action
    both = {key: np.stack([one[key], other[key]]) for key in reversed(list(one))}
    assert policy.predict(both).tolist() == policy.predict([one, other]).tolist()
    assert policy.predict(both)[0].tolist() == action


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"image": None}, r"obs has no key 'image'; it has 'choice', 'vector'"),
        (
            {"vector": [0.0] * 5},
            r"obs\['vector'\] has the shape \[5\]; expected \[3\], or \[n, 3\]",
        ),
        ({"vector": [[0.0] * 3] * 2}, r"obs\['choice'\] is one .* obs\['vector'\] is a batch of 2"),
        ({"vector": [0.0, [1.0], 2.0]}, r"obs\['vector'\] has parts of different shapes"),
        ({"vector": ["a", "b", "c"]}, r"obs\['vector'\] holds <U1; expected numbers"),
        ({"vector": {"x": 1.0}}, r"obs\['vector'\] is a dict; expected an array"),
        ({"vector": [0.0, np.inf, 0.0]}, r"obs\['vector'\] has the value inf; it must be finite"),
        ({"image": np.full((6, 6, 1), 0.5)}, r"obs\['image'\] has the value 0.5; .* uint8, .* 255"),
        ({"image": np.full((6, 6, 1), 256)}, r"obs\['image'\] has the value 256; .* 0 to 255"),
        ({"image": np.full((6, 6, 1), -1)}, r"obs\['image'\] has the value -1; .* 0 to 255"),
        ({"choice": 0.5}, r"obs\['choice'\] has the value 0.5"),
        ({"choice": 3}, r"observation 'choice' holds 3, which is outside of Discrete\(3\)"),
    ],
)
def test_part_of_an_observation_that_does_not_fit_is_named(
    change: dict[str, Any], error: str, mixed_policy: LoadedPolicy
) -> None:
    obs = {**mixed_policy.observation_space.sample(), **change}

    with pytest.raises((ValueError, ObservationError), match=error):
        mixed_policy.predict({key: leaf for key, leaf in obs.items() if leaf is not None})


def test_observation_of_another_kind_is_refused(mixed_policy: LoadedPolicy) -> None:
    one = mixed_policy.observation_space.sample()
    batch = {key: np.stack([leaf, leaf]) for key, leaf in one.items()}

    with pytest.raises(ValueError, match=r"obs is a ndarray; expected a dict with 'choice', 'im"):
        mixed_policy.predict(np.zeros(4))
    with pytest.raises(ValueError, match=r"obs\['choice'\] has 2 observations, but .* has 1"):
        mixed_policy.predict({**batch, "vector": batch["vector"][:1]})
    with pytest.raises(ValueError, match=r"obs\[1\] is a batch; a list holds single"):
        mixed_policy.predict([one, batch])


@pytest.mark.parametrize("n_values", [2, 5])
def test_tuple_that_reset_or_step_returns_is_named(n_values: int) -> None:
    obs = np.zeros(3, np.float32)
    returned = (obs, *[0.0, False, False][: n_values - 2], {})

    with pytest.raises(ValueError, match=f"obs is a tuple of {n_values}, as reset and step .* fir"):
        as_batch(spaces.Box(-1, 1, (3,)), returned)
    assert as_batch(spaces.Box(-1, 1, (3,)), tuple(obs)).is_one  # a tuple of numbers


@pytest.fixture
def mixed_policy(here: Path) -> LoadedPolicy:
    return load(_mixed_run())


def test_resume_of_latest_continues_the_newest_run(here: Path, capsys: Capture) -> None:
    with pytest.raises(ConfigError, match="resume=latest: latest: runs/ has no runs"):
        train(resume="latest")
    older = train(small(), quiet=True)
    newer = train(small(), seed=9, quiet=True)
    goal = 2 * newer.env_steps

    again = train(resume="latest", total_steps=goal, quiet=True)
    assert (again.run_dir, again.env_steps) == (newer.run_dir, goal)
    assert main(["train", "resume=latest", f"total_steps={2 * goal}"]) == 0
    assert f"env step {2 * goal:,}" in capsys.readouterr().out
    assert again.run_dir != older.run_dir


def test_masks_of_one_env_and_of_a_batch(here: Path) -> None:
    env = {"target": "tiny_envs.ForbiddingEnv", "id": None}
    policy = load(train(small(), env=env, quiet=True).run_dir)
    obs = np.full((2, 4), 0.5, np.float32)

    assert policy.predict(obs[0], action_mask=[0, 0, 0, 1]) == 3
    assert policy.predict(obs, action_mask=[[0, 0, 0, 1], [1, 0, 0, 0]]).tolist() == [3, 0]
    for mask, error in (
        (None, r'trained with action masks.*predict\(obs, action_mask=info\["action_mask"\]\)'),
        ([1, 0], r"action_mask: an action mask must have 4 entries, got shape \(2,\)"),
        ([0, 0, 0, 0], r"action_mask: the action mask of env 0 allows no action"),
        ([[1, 0, 0, 0]] * 3, r"action_mask has the shape \[3, 4\]; expected \[n\]"),
        ("left", r"action_mask has the shape \[\]; expected one entry per action"),
    ):
        with pytest.raises(ValueError, match=error):
            policy.predict(obs[0], action_mask=mask)


@pytest.mark.parametrize("words", [[], ["network=lstm", "agent.n_minibatches=1"]])
def test_no_observations_give_no_actions(words: list[str], here: Path) -> None:
    run = train(small(), words, quiet=True)
    none = np.zeros((0, 4), np.float32)

    for deterministic in (True, False):
        memory = run.agent.new_memory(0)
        actions = run.agent.act_batch(none, deterministic, memory=memory)
        assert (actions.shape, actions.dtype) == ((0,), np.int64)
    assert load(run.run_dir).predict(none).shape == (0,)
    assert load_policy("latest")[0].act_batch(none, True, memory=memory).shape == (0,)


def test_recurrent_policy_remembers_until_it_is_reset(here: Path) -> None:
    run = train(small(), network="lstm", agent={"n_minibatches": 1}, quiet=True).run_dir
    policy = load(run)
    obs = np.full(policy.observation_space.shape or (), 0.1, dtype=np.float32)
    policy.predict(obs)
    first = policy._memory.clone()

    policy.predict(obs)
    later = policy._memory.clone()
    policy.reset()
    policy.predict(obs)

    assert not first.equal(later)
    assert first.equal(policy._memory)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, ml_pipeline; print(ml_pipeline.__version__, 'torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [ml_pipeline.__version__, "False"]
