"""Full training runs that must learn CartPole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Capture

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import train
from ml_pipeline.runs.loggers import read_metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_run_solves_cartpole_within_100k_steps(
    here: Path, seed: int, capsys: Capture
) -> None:
    result = train([f"seed={seed}"])
    capsys.readouterr()

    assert result.env_steps <= 100_000
    for name in ("latest", "best"):
        assert main(["evaluate", str(result.run_dir), "--deterministic", "--checkpoint", name]) == 0
        out = capsys.readouterr().out
        assert "20 episodes" in out
        (mean,) = re.findall(r"mean ([\d.]+) ", out)
        # Rounding differs between CPUs, so the best policy may miss 500 in a game.
        assert float(mean) >= 475.0  # Gymnasium's threshold


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensor_cartpole_is_learned_on_the_cpu(here: Path) -> None:
    settings = ["n_envs=64", "agent.n_steps=32", "agent.n_epochs=4", "agent.n_minibatches=4"]
    settings += ["agent.scale_reward=true"]
    rarely = ["callbacks.evaluation.eval_every_steps=100_000", "logger=none", "device=cpu"]

    result = train(["env=torch_cartpole", "total_steps=300_000", "seed=1", *settings, *rarely])

    assert result.env_steps <= 300_000
    assert result.mean_reward >= 400.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_discrete_sac_learns_cartpole_within_5k_steps(here: Path) -> None:
    settings = ["agent.learning_rate=2e-3", "agent.batch_size=64", "agent.tau=0.02"]
    settings += ["agent.learning_starts=500", "agent.updates_per_env_step=0.5", "n_envs=8"]
    settings += ["network.activation=relu", "agent.buffer_size=20_000", "total_steps=5_000"]

    run = train(["agent=sac", "env=cartpole", "logger=none", "device=cpu", *settings]).run_dir
    last = read_metrics(run / "metrics.csv")[-1]

    assert float(last["eval/episode_return"]) >= 150.0  # random actions get about 22
    # Half of log(2) is 0.347.
    assert 0.2 < float(last["policy/entropy"]) < 0.5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bound", [0.1, 20.0])
def test_sac_learns_pendulum_with_narrow_and_wide_bounds(here: Path, bound: float) -> None:
    rescaled = f"{{_target_: gymnasium.wrappers.RescaleAction, min_action: {-bound}"
    settings = [f"+env.wrappers.rescaled={rescaled}, max_action: {bound}}}"]
    settings += ["total_steps=8_000", "callbacks.evaluation.eval_every_steps=8_000"]

    run = train(["experiment=sac_pendulum", "logger=none", "device=cpu", "seed=1", *settings])
    last = read_metrics(run.run_dir / "metrics.csv")[-1]

    assert float(last["eval/episode_return"]) >= -400.0  # random actions get about -1,200
    assert float(last["policy/temperature"]) < 0.5
