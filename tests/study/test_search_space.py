"""The search space of a study, and the arguments of ``study start``."""

from __future__ import annotations

from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")

from ml_pipeline.assembly.agent import agent_name  # noqa: E402
from ml_pipeline.assembly.compose import ConfigError, checked_config, compose_config  # noqa: E402
from ml_pipeline.study.folder import StudyError  # noqa: E402
from ml_pipeline.study.space import (  # noqa: E402
    check_space,
    distributions,
    param_overrides,
    read_space,
)
from ml_pipeline.study.start import read_request  # noqa: E402

NEEDS = r"agent.gamma: needs low and high \(log or step\), or choices; got "


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        # Rules that cannot be drawn from
        ("agent.gamma: 3", f"{NEEDS}3"),
        ("agent.gamma: {low: 1}", NEEDS),
        ("agent.gamma: {low: 1, high: 2, stop: 3}", NEEDS),
        ("agent.gamma: {low: 1, high: 0}", "agent.gamma: .*low=1, high=0"),
        ("agent.gamma: {low: 0, high: 1, log: true}", "agent.gamma: .*low=0, high=1"),
        ("agent.gamma: {low: 0.5, high: 1, log: true, step: 0.1}", "agent.gamma: .*step.*log"),
        ("agent.gamma: {low: a, high: 1}", "agent.gamma: .*'a'"),
        ("agent.gamma: {low: 0, high: 1, step: 0}", "agent.gamma: .*step=0"),
        ("agent.gamma: {choices: []}", "agent.gamma: .*one or more"),
        ("agent.gamma: {choices: 1}", "agent.gamma: choices must be a list"),
        ("agent.gamma: {choices: [1, 1]}", "agent.gamma: choices has a value twice"),
        # Values that no trial could train with
        ("agent.gamma: {low: 0.9, high: 1.5}", ".*agent.gamma=1.5: must be between 0 and 1"),
        ("agent.gama: {low: 0.9, high: 1}", ".*agent.gama=0.9: Key 'gama'"),
        ("agent.n_epochs: {low: 1.5, high: 3}", ".*1.5"),
        ("network: {choices: [mlp, nope]}", ".*network=nope: no such option"),
        ("env: {choices: [3]}", ".*env=3: name an option of this group"),
        ("agent.n_steps: {choices: [8, 3]}", ".*agent.n_minibatches=2: agent.n_steps=3 x"),
        ("agent.n_steps: {low: 2, high: 8}", ".*agent.n_minibatches=2: agent.n_steps=3 x"),
        (
            "agent.n_steps: {choices: [8, 4]}\nagent.n_minibatches: {choices: [2, 8]}",
            ".*agent.n_minibatches=8: agent.n_steps=4 x",
        ),
    ],
)
def test_mistake_in_a_space_is_refused(here: Path, rule: str, words: str) -> None:
    (here / "space.yaml").write_text(rule)
    overrides = ["n_envs=1", "agent.n_minibatches=2"]

    with pytest.raises(ConfigError, match=f"search space: {words}"):
        check_space(read_space("space.yaml"), compose_config(overrides), overrides)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "dqn", "sac"])
def test_default_space_fits_any_number_of_envs(agent: str) -> None:
    chosen = f"agent={agent}"
    space = read_space(agent_name(checked_config(compose_config([chosen]))))

    for n_envs in (1, 3, 8):
        overrides = [chosen, f"n_envs={n_envs}"]
        check_space(space, compose_config(overrides), overrides)


def test_drawn_values_become_the_overrides_that_the_space_names(here: Path) -> None:
    (here / "space.yaml").write_text(
        "network.hidden_sizes: {choices: [[64, 64], [256]]}\n"
        "agent.max_kl: {choices: [null, 0.02]}\n"
        "agent.normalize_obs: {choices: [true]}\n"
        "network: {choices: [mlp]}\n"
        "agent.n_epochs: {low: 3, high: 5}\n"
    )
    space = read_space("space.yaml")
    check_space(space, compose_config([]), [])
    study = optuna.create_study()
    study.enqueue_trial({"network.hidden_sizes": "[64, 64]", "agent.max_kl": None})

    overrides = param_overrides(space, study.ask(distributions(space)).params)

    assert overrides[:4] == [
        "network.hidden_sizes=[64,64]",
        "agent.max_kl=null",
        "agent.normalize_obs=true",
        'network="mlp"',
    ]
    assert overrides[4] in [f"agent.n_epochs={n}" for n in (3, 4, 5)]
    assert compose_config(overrides).network.hidden_sizes == [64, 64]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("n_trials=0", "n_trials=0: must be an integer of at least 1"),
        ("n_jobs=two", "n_jobs=two: must be an integer of at least 1"),
        ("resume=runs/x", "resume=runs/x: not possible in a study"),
        ("cartpole", "cartpole: not an override; write key=value"),
    ],
)
def test_argument_that_a_study_does_not_take_is_refused(argument: str, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        read_request(["env=cartpole", argument])
