"""Our PPO and Stable-Baselines3's on the same data, number by number.

    pip install -e ".[peers]"
    python benchmarks/sb3_numbers.py
    python benchmarks/sb3_numbers.py --env Pendulum-v1 --n-steps 2048 --box-policy gaussian

Both get the same trajectory, weights and minibatch. Each row shows a quantity of both libraries
and the largest absolute difference between its entries. SB3's own code computes its side:
``VecNormalize``, ``RolloutBuffer``, the policy and ``PPO.train``. The defaults are the settings of
MountainCarContinuous-v0 in rl-baselines3-zoo.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.protocols import Minibatch, PolicyInput, Rates
from ml_pipeline.training.returns import gae
from ml_pipeline.training.reward_scaler import RewardScaler
from ml_pipeline.training.schedules import Schedules

GAMMA, LAM = 0.9999, 0.9
LEARNING_RATE, CLIP_RANGE, ENTROPY_COEF = 7.77e-5, 0.1, 0.00429
VALUE_COEF, MAX_GRAD_NORM, N_EPOCHS = 0.19, 5.0, 10
Array = NDArray[Any]


class Trajectory(NamedTuple):
    """Raw steps, and what ``VecNormalize`` made of them: [T, n_envs, ...] each."""

    obs: Array  # raw, also after the last step: [T + 1, n_envs, *obs]
    reward: Array
    done: Array
    truncated: Array
    sb3_obs: Array  # [T + 1, n_envs, *obs]
    sb3_reward: Array


def row(name: str, theirs: Any, ours: Any) -> None:
    """Print the mean of a quantity on both sides, and the largest difference of its entries."""
    left, right = (np.asarray(each, dtype=np.float64) for each in (theirs, ours))
    largest = float(np.abs(left - right).max())
    print(f"| {name} | {left.mean():.6g} | {right.mean():.6g} | {largest:.2g} |")


def heading(title: str) -> None:
    print(f"\n| {title} | SB3 | ours | largest difference |\n|---|---|---|---|")


def sb3_model(args: argparse.Namespace, env: Any, *, normalize_advantage: bool, batch: int) -> Any:
    from stable_baselines3 import PPO

    return PPO(
        "MlpPolicy", env, n_steps=args.n_steps, batch_size=batch, n_epochs=N_EPOCHS, gamma=GAMMA,
        gae_lambda=LAM, clip_range=CLIP_RANGE, ent_coef=ENTROPY_COEF, vf_coef=VALUE_COEF,
        max_grad_norm=MAX_GRAD_NORM, learning_rate=LEARNING_RATE,
        use_sde=args.box_policy == "gsde", normalize_advantage=normalize_advantage,
        seed=1, device="cpu",
        policy_kwargs={"log_std_init": args.log_std_init, "ortho_init": args.orthogonal},
    )  # fmt: skip


def our_agent(args: argparse.Namespace, *, normalize_advantage: bool = True) -> PPOAgent:
    """Its normaliser changes nothing before it learns: feed it normalised observations."""
    env = gym.make(args.env)
    config = PPOConfig(
        n_steps=args.n_steps, n_minibatches=1, n_epochs=N_EPOCHS, gamma=GAMMA, gae_lambda=LAM,
        clip_range=CLIP_RANGE, entropy_coef=ENTROPY_COEF, value_coef=2.0 * VALUE_COEF,
        max_grad_norm=MAX_GRAD_NORM, learning_rate=LEARNING_RATE,
        learning_rate_schedule="constant", box_policy=args.box_policy, gsde_every_steps=0,
        log_std_init=args.log_std_init, orthogonal_init=args.orthogonal, normalize_obs=True,
        normalize_advantage=normalize_advantage,
    )  # fmt: skip
    spaces = env.observation_space, env.action_space
    return PPOAgent(*spaces, MLP, config, device=torch.device("cpu"), seed=1)


def copy_weights(model: Any, agent: PPOAgent) -> None:
    """Give our agent the weights of SB3's policy."""
    theirs = dict(model.policy.named_parameters())
    for name, (values, _) in agent.adam.views.items():
        values.copy_(theirs[sb3_name(name)].detach())
    agent.backend.refresh()


def sb3_name(name: str) -> str:
    for own, other in (
        ("actor.layers", "mlp_extractor.policy_net"),
        ("critic.layers", "mlp_extractor.value_net"),
        ("policy_head", "action_net"),
        ("value_head", "value_net"),
        ("distribution.", ""),
    ):
        name = name.replace(own, other)
    return name


def played(args: argparse.Namespace) -> tuple[Any, Trajectory]:
    """Random actions, held for some steps, in SB3's envs behind ``VecNormalize``."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    venv = VecNormalize(DummyVecEnv([lambda: gym.make(args.env)] * args.n_envs), gamma=GAMMA)
    venv.seed(1)
    random = np.random.default_rng(1)
    sb3_obs = [venv.reset()]
    obs, rows = [venv.get_original_obs()], []
    for step in range(args.steps):
        if step % 50 == 0:
            space = venv.action_space
            action = random.uniform(space.low, space.high, (args.n_envs, *space.shape))
        normalised, reward, done, infos = venv.step(action.astype(np.float32))
        cut = [info.get("TimeLimit.truncated", False) for info in infos]
        rows.append((venv.get_original_reward(), done, cut, reward))
        sb3_obs.append(normalised)
        obs.append(venv.get_original_obs())
    raw, done, truncated, scaled = (np.array(each) for each in zip(*rows, strict=True))
    return venv, Trajectory(np.array(obs), raw, done, truncated, np.array(sb3_obs), scaled)


def compare_normalisers(args: argparse.Namespace, trajectory: Trajectory, venv: Any) -> None:
    """Ours learn once per rollout, SB3's in every step."""
    agent = our_agent(args)
    scaler = RewardScaler(args.n_envs, gamma=GAMMA, clip=10.0)
    n_steps, shown = args.n_steps, 1
    heading("normalisers, by rollout")
    for number in range(1, args.steps // n_steps + 1):
        rows = slice((number - 1) * n_steps, number * n_steps)
        raw = torch.from_numpy(trajectory.obs[rows].astype(np.float32))
        obs = agent.model.preprocess(raw)
        assert isinstance(obs, torch.Tensor)
        reward = scaler.scaled(trajectory.reward[rows], trajectory.done[rows])
        agent.learn_moments(raw)
        if number == shown:
            row(f"normalised obs, rollout {number}", trajectory.sb3_obs[rows], obs)
            row(f"scaled reward, rollout {number}", trajectory.sb3_reward[rows], reward)
            shown *= 4
    moments = agent.model.preprocess.moments_of("")
    assert moments is not None
    row("mean of obs, at the end", venv.obs_rms.mean, moments.mean)
    row("deviation of obs, at the end", np.sqrt(venv.obs_rms.var), moments.variance.sqrt())
    mean, variance, _ = scaler.state_dict()["moments"]
    row("mean of the return, at the end", venv.ret_rms.mean, mean)
    row("deviation of the return, at the end", np.sqrt(venv.ret_rms.var), np.sqrt(variance))


def compare_first_weights(args: argparse.Namespace, model: Any) -> None:
    heading("first weights: deviation of each parameter (both are random)")
    theirs = dict(model.policy.named_parameters())
    for name, (values, _) in our_agent(args).adam.views.items():
        kind = "mean" if name.endswith("log_std") else "deviation"
        sides = (theirs[sb3_name(name)].detach(), values)
        left, right = (float(x.mean() if kind == "mean" else x.std(correction=0)) for x in sides)
        row(f"{kind} of {name}", left, right)


def compare_policy(model: Any, agent: PPOAgent, obs: torch.Tensor) -> Minibatch:
    """Returns the minibatch with SB3's numbers; the advantages are random."""
    generator = torch.Generator().manual_seed(3)
    inputs = PolicyInput(obs, None, None, None)
    heading("policy, with the same weights")
    with torch.no_grad():
        noise = agent.draw_noise(1, len(obs), generator)[0]
        ours = agent.sample_batch(inputs, noise).action
        distribution = model.policy.get_distribution(obs)
        if agent.config.box_policy == "gsde":
            # SB3 holds its noise as matrices; give it ours, scaled by the standard deviation.
            matrices = noise * model.policy.log_std.exp()
            distribution.exploration_matrices, distribution.exploration_mat = matrices, None
            theirs = distribution.sample()
        else:
            theirs = distribution.distribution.mean + noise * model.policy.log_std.exp()
        row("sampled action, same noise", theirs, ours)
        outputs, _ = agent.backend.outputs(inputs)
        row("greedy action", distribution.mode(), agent.distribution.mode(outputs))
        value, log_prob, entropy = model.policy.evaluate_actions(obs, theirs)
        our_log_prob, our_value = agent.score_batch(inputs, theirs)
        _, our_entropy = agent.distribution.log_prob_and_entropy(outputs, theirs)
    row("log-probability", log_prob, our_log_prob)
    row("entropy", entropy, our_entropy)
    row("value", value.flatten(), our_value)
    older = log_prob + 0.1 * torch.randn(len(obs), generator=generator)
    advantage, target = torch.randn(2, len(obs), generator=generator)
    return Minibatch(inputs, theirs, older, value.flatten(), 3.0 * advantage + 1.0, target)


def compare_advantages(model: Any, trajectory: Trajectory, n_steps: int) -> None:
    """SB3 adds the value of a truncated step's final observation to its reward."""
    from stable_baselines3.common.buffers import RolloutBuffer

    n_envs = trajectory.reward.shape[1]
    # The last steps of an episode, so that the rollout holds an end where there is one.
    ends = np.flatnonzero(trajectory.done.any(axis=1))
    first = max(0, int(ends[0]) - n_steps // 2) if len(ends) else 0
    rows = slice(first, first + n_steps)
    reward, done = trajectory.sb3_reward[rows].copy(), trajectory.done[rows]
    truncated = trajectory.truncated[rows].astype(bool)
    random = np.random.default_rng(4)
    value, final = random.normal(size=(2, len(reward) + 1, n_envs)).astype(np.float32)
    buffer = RolloutBuffer(
        len(reward), model.observation_space, model.action_space, gamma=GAMMA, gae_lambda=LAM,
        n_envs=n_envs,
    )  # fmt: skip
    buffer.rewards = np.where(truncated, reward + GAMMA * final[:-1], reward).astype(np.float32)
    buffer.values = value[:-1].copy()
    buffer.episode_starts = np.concatenate([np.zeros((1, n_envs)), done[:-1]]).astype(np.float32)
    buffer.compute_returns_and_advantage(torch.from_numpy(value[-1]), done[-1])
    next_value = np.where(truncated, final[:-1], value[1:])
    next_value[done & ~truncated] = 0.0
    advantage = gae(reward, value[:-1], next_value, done, gamma=GAMMA, lam=LAM)
    ends_of = f"{int(done.sum())} ends, {int(truncated.sum())} of them truncated"
    heading(f"advantages of a rollout with {ends_of}")
    row("advantage", buffer.advantages, advantage)
    row("target of the value", buffer.returns, advantage + value[:-1])


def compare_updates(
    args: argparse.Namespace, env: Any, batch: Minibatch, *, normalize_advantage: bool
) -> None:
    """``PPO.train`` on one minibatch, N_EPOCHS times, and ours."""
    from stable_baselines3.common.logger import Logger

    size = len(batch.action)
    model = sb3_model(args, env, normalize_advantage=normalize_advantage, batch=size)
    agent = our_agent(args, normalize_advantage=normalize_advantage)
    copy_weights(model, agent)
    model.set_logger(Logger(folder=None, output_formats=[]))
    buffer = model.rollout_buffer
    shape = (args.n_steps, args.n_envs)
    obs = batch.inputs.obs
    assert isinstance(obs, torch.Tensor)
    for name, field in (
        ("observations", obs),
        ("actions", batch.action),
        ("log_probs", batch.log_prob),
        ("values", batch.value),
        ("advantages", batch.advantage),
        ("returns", batch.value_target),
    ):
        held = getattr(buffer, name)
        setattr(buffer, name, field.numpy().reshape(*shape, *held.shape[2:]).copy())
    buffer.full, buffer.generator_ready = True, False
    model.train()
    rates = Rates(LEARNING_RATE, CLIP_RANGE, ENTROPY_COEF)
    results = [agent.update(batch, rates) for _ in range(N_EPOCHS)]
    means = {
        name: float(torch.stack([getattr(each, name) for each in results]).mean())
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    }
    logged = model.logger.name_to_value
    how = "normalised advantages" if normalize_advantage else "raw advantages"
    heading(f"{N_EPOCHS} gradient steps on one minibatch of {size}, {how}")
    row("policy loss", logged["train/policy_gradient_loss"], means["policy_loss"])
    row("value loss (ours doubled)", logged["train/value_loss"], 2.0 * means["value_loss"])
    row("entropy", -logged["train/entropy_loss"], means["entropy"])
    row("clip fraction", logged["train/clip_fraction"], means["clip_fraction"])
    row("KL of the last step", logged["train/approx_kl"], float(results[-1].approx_kl))
    theirs = dict(model.policy.named_parameters())
    for name, (values, _) in agent.adam.views.items():
        row(name, theirs[sb3_name(name)].detach(), values)


def compare_annealing(n_iterations: int = 10) -> None:
    """SB3 anneals after it collects a rollout, we before; so ours is one iteration behind."""
    schedules = Schedules(PPOConfig(learning_rate=LEARNING_RATE, learning_rate_schedule="linear"))
    theirs = [LEARNING_RATE * (1.0 - (i + 1) / n_iterations) for i in range(n_iterations)]
    ours = [float(schedules.rates(i / n_iterations).learning_rate) for i in range(n_iterations)]
    heading(f"learning rates of {n_iterations} iterations, linear schedule")
    row("learning rate", theirs, ours)
    row("learning rate, ours one iteration later", theirs[:-1], ours[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="MountainCarContinuous-v0", help="with Box spaces")
    parser.add_argument("--n-envs", type=int, default=1)
    parser.add_argument("--n-steps", type=int, default=8, help="per env and rollout")
    parser.add_argument("--steps", type=int, default=20_000, help="of the trajectory, per env")
    parser.add_argument("--box-policy", choices=["gsde", "gaussian"], default="gsde")
    parser.add_argument("--log-std-init", type=float, default=-3.29)
    parser.add_argument("--orthogonal", action="store_true", help="orthogonal first weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    venv, trajectory = played(args)
    compare_normalisers(args, trajectory, venv)
    size = args.n_steps * args.n_envs
    model = sb3_model(args, venv, normalize_advantage=True, batch=size)
    compare_first_weights(args, model)
    agent = our_agent(args)
    copy_weights(model, agent)
    last = trajectory.sb3_obs[-args.n_steps :].reshape(size, -1)
    batch = compare_policy(model, agent, torch.from_numpy(last.astype(np.float32)))
    compare_advantages(model, trajectory, args.n_steps)
    for normalize_advantage in (False, True):
        compare_updates(args, venv, batch, normalize_advantage=normalize_advantage)
    compare_annealing()


if __name__ == "__main__":
    main()
