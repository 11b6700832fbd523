"""Full training runs that must solve CartPole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_pipeline.__main__ import main
from ml_pipeline.build import train


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_run_solves_cartpole_within_100k_steps(
    here: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train([f"seed={seed}"])
    capsys.readouterr()

    assert result.env_steps <= 100_000
    for name in ("latest", "best"):
        assert main(["evaluate", str(result.run_dir), "--deterministic", "--checkpoint", name]) == 0
        assert "20 episodes" in (out := capsys.readouterr().out)
        assert "mean 500.0  std 0.0  min 500.0  max 500.0" in out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_tensor_cartpole_is_learned_on_the_cpu(here: Path, seed: int) -> None:
    settings = ["n_envs=64", "agent.n_steps=32", "agent.n_epochs=4", "agent.n_minibatches=4"]
    settings += ["agent.scale_reward=true"]
    rarely = ["callbacks.evaluation.eval_every_steps=100_000", "logger=none", "device=cpu"]

    result = train(
        ["env=torch_cartpole", "total_steps=300_000", f"seed={seed}", *settings, *rarely]
    )

    assert result.env_steps <= 300_000
    assert result.mean_reward >= 400.0
