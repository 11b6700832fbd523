"""``from ml_pipeline import train, load``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

import ml_pipeline
from ml_pipeline import load, train
from ml_pipeline.assembly.api import as_overrides
from ml_pipeline.assembly.compose import ConfigError, plain_config, stored_config


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
