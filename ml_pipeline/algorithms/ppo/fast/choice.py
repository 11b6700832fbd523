"""fastest: the fast backend for PPO's arithmetic that fits a model and its device.

``mirrored`` is what a backend repeats; ``python tests/fingerprints.py`` records it again.
"""

from __future__ import annotations

import importlib.util

import torch

from ml_pipeline.algorithms.ppo.contracts import FastPPO, PlainPPO
from ml_pipeline.algorithms.ppo.fast.numpy_ppo import NumpyPPO
from ml_pipeline.algorithms.ppo.fast.numpy_recurrent_ppo import RecurrentNumpyPPO
from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy import numpy_mlp, optimiser
from ml_pipeline.policy.distributions import Categorical, Distribution
from ml_pipeline.policy.optimiser import FlatAdam

# What all backends repeat.
MIRRORED: Mirrored = {
    **numpy_mlp.MIRRORED,
    **optimiser.MIRRORED,
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.epoch": "a24848d0333a",
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.update": "90d82c88be79",
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.sample_batch": "ffe0e71d1a1a",
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.score_batch": "2481d19f5caa",
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.value_batch": "147fee09830e",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.outputs": "45fc5ddf0773",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.sample": "9abe96fb737c",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.score": "2b27c2de66bf",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.value": "fc5c63a393f7",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.passed": "a23c4000a6f9",
    "ml_pipeline.algorithms.ppo.agent.as_row": "59efef04de11",
    "ml_pipeline.algorithms.ppo.loss.current": "3ce2540a9880",
    "ml_pipeline.algorithms.ppo.agent.TorchPPO.update": "6eaffff5495e",
    "ml_pipeline.algorithms.ppo.loss.ppo_loss": "a4bcf56944e0",
    "ml_pipeline.algorithms.ppo.loss.normalised": "46ef7c9d5b79",
    "ml_pipeline.algorithms.ppo.loss.policy_change": "7ff95ec6a831",
    "ml_pipeline.algorithms.ppo.loss.Minibatch.mapped": "f1646552aaf4",
    "ml_pipeline.algorithms.ppo.loss.Minibatch.take": "b3cc5a8f2aac",
    "ml_pipeline.policy.actor_critic.ActorCritic.forward": "dd90fa4265ff",
    "ml_pipeline.policy.actor_critic.ActorCritic.policy": "caef38db9116",
    "ml_pipeline.policy.actor_critic.ActorCritic._outputs": "f8983062120a",
    "ml_pipeline.policy.actor_critic._run": "a24ed2f18c94",
    "ml_pipeline.policy.actor_critic.policy_outputs": "22265cd20bc0",
    "ml_pipeline.policy.contracts.PolicyInput.mapped": "1b7413d796d1",
}
# With discrete actions, and with a Box of actions.
CATEGORICAL: Mirrored = {
    "ml_pipeline.policy.distributions.FORBIDDEN": "3c8f41129806",
    "ml_pipeline.policy.distributions.Distribution.masked": "978108a4a8ca",
    "ml_pipeline.policy.distributions._drawn": "cbae99a2e3ba",
    "ml_pipeline.policy.distributions.Categorical.sample": "390dbe639409",
    "ml_pipeline.policy.distributions.Categorical.log_prob_and_entropy": "35e696c64122",
}
GAUSSIAN: Mirrored = {
    "ml_pipeline.policy.distributions.LOG_SQRT_2PI": "400fab3384cc",
    "ml_pipeline.policy.distributions.DiagonalGaussian.sample": "6a8a10234f0f",
    "ml_pipeline.policy.distributions.DiagonalGaussian.log_prob_and_entropy": "da99b38ce37c",
}


def mirrored(backend: FastPPO, distribution: Distribution) -> dict[str, str]:
    """What ``backend`` repeats with this distribution: edits elsewhere do not concern it."""
    found = {**MIRRORED, **(CATEGORICAL if isinstance(distribution, Categorical) else GAUSSIAN)}
    return {**found, **backend.also_mirrored}


def fastest(plain: PlainPPO, *, masked: bool) -> FastPPO | None:
    """The fast backend that covers ``plain``'s model on its device, or None."""
    device = plain.adam.values.device
    for backend in (NumpyPPO, RecurrentNumpyPPO):
        if device.type == "cpu" and backend.covers(plain.model):
            return backend(plain.model, plain.adam, plain.config)
    # Triton comes with torch's CUDA builds; its kernels have no masks, and ROCm is untested.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if (
        not is_nvidia
        or masked
        or not isinstance(plain.adam, FlatAdam)
        or importlib.util.find_spec("triton") is None
    ):
        return None
    from ml_pipeline.algorithms.ppo.fast.triton_ppo import TritonPPO

    return TritonPPO(plain) if TritonPPO.covers(plain.model) else None
