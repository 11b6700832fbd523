"""Our PPO and Stable-Baselines3's on the same data, number by number.

    pip install -e ".[peers]"
    python benchmarks/sb3_numbers.py
    python benchmarks/sb3_numbers.py --task lunar_lander
    python benchmarks/sb3_numbers.py --task taxi

Both get the same trajectory, weights and minibatch. Each row shows a quantity of both libraries
and the largest absolute difference between its entries. SB3's own code computes its side:
``VecNormalize``, ``RolloutBuffer``, the policy and ``PPO.train``. ``mountain_car`` has the settings
of MountainCarContinuous-v0 in rl-baselines3-zoo, ``lunar_lander`` SB3's defaults with continuous
actions. ``taxi`` compares action masks with sb3-contrib's MaskablePPO, on random states.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from typing import Any, NamedTuple
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from ml_pipeline.algorithms.ppo import agent as ppo
from ml_pipeline.algorithms.ppo import loss as ppo_loss
from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates
from ml_pipeline.algorithms.ppo.rollout import RolloutBuffer
from ml_pipeline.algorithms.ppo.trainer import Schedules
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.env_batch import FinalObservation
from ml_pipeline.training.returns import gae
from ml_pipeline.training.reward_scaler import RewardScaler

N_EPOCHS = 10
Array = NDArray[Any]


class Task(NamedTuple):
    """An env and its settings, as SB3 names them."""

    env: str
    n_envs: int = 1
    n_steps: int = 2048  # per env and rollout
    batch_size: int = 64
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    box_policy: str = "gaussian"
    log_std_init: float = 0.0
    ortho_init: bool = True
    masked: bool = False


TASKS = {
    "mountain_car": Task(
        "MountainCarContinuous-v0", n_steps=8, batch_size=8, learning_rate=7.77e-5, gamma=0.9999,
        gae_lambda=0.9, clip_range=0.1, ent_coef=0.00429, vf_coef=0.19, max_grad_norm=5.0,
        box_policy="gsde", log_std_init=-3.29, ortho_init=False,
    ),
    "lunar_lander": Task("LunarLanderContinuous-v3"),
    "taxi": Task(
        "Taxi-v4", n_envs=8, n_steps=128, batch_size=256, learning_rate=1e-3, ent_coef=0.01,
        masked=True,
    ),
}  # fmt: skip


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


def sb3_model(
    task: Task, env: Any, *, normalize_advantage: bool = True, whole_batches: bool = True
) -> Any:
    """``whole_batches``: a minibatch is a whole rollout."""
    from stable_baselines3 import PPO

    size = task.n_steps * task.n_envs
    options: dict[str, Any] = {
        "n_steps": task.n_steps, "batch_size": size if whole_batches else task.batch_size,
        "n_epochs": N_EPOCHS,
        "gamma": task.gamma, "gae_lambda": task.gae_lambda, "clip_range": task.clip_range,
        "ent_coef": task.ent_coef, "vf_coef": task.vf_coef, "max_grad_norm": task.max_grad_norm,
        "learning_rate": task.learning_rate, "normalize_advantage": normalize_advantage,
    }  # fmt: skip
    policy: dict[str, Any] = {"ortho_init": task.ortho_init}
    learner: Any = PPO
    if task.masked:
        from sb3_contrib import MaskablePPO

        learner = MaskablePPO
    else:
        options["use_sde"] = task.box_policy == "gsde"
        policy["log_std_init"] = task.log_std_init
    return learner("MlpPolicy", env, **options, policy_kwargs=policy, seed=1, device="cpu")


def our_agent(task: Task, *, normalize_advantage: bool = True, fast: str = "auto") -> PPOAgent:
    """Its normaliser changes nothing before it learns: feed it normalised observations."""
    env = gym.make(task.env)
    config = PPOConfig(
        n_steps=task.n_steps, n_minibatches=1, n_epochs=N_EPOCHS, gamma=task.gamma,
        gae_lambda=task.gae_lambda, clip_range=task.clip_range, entropy_coef=task.ent_coef,
        value_coef=2.0 * task.vf_coef, max_grad_norm=task.max_grad_norm,
        learning_rate=task.learning_rate, learning_rate_schedule="constant",
        box_policy=task.box_policy, gsde_every_steps=0, log_std_init=task.log_std_init,
        orthogonal_init=task.ortho_init, normalize_obs=True,
        normalize_advantage=normalize_advantage, action_mask="info" if task.masked else "none",
        fast=fast,
    )  # fmt: skip
    spaces = env.observation_space, env.action_space
    return PPOAgent(Spaces(*spaces), MLP, config, RunContext.alone())


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


def played(task: Task, steps: int) -> tuple[Any, Trajectory]:
    """Random actions, held for some steps, in SB3's envs behind ``VecNormalize``."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    venv = VecNormalize(DummyVecEnv([lambda: gym.make(task.env)] * task.n_envs), gamma=task.gamma)
    venv.seed(1)
    random = np.random.default_rng(1)
    sb3_obs = [venv.reset()]
    obs, rows = [venv.get_original_obs()], []
    for step in range(steps):
        if step % 50 == 0:
            space: Any = venv.action_space
            action = random.uniform(space.low, space.high, (task.n_envs, *space.shape))
        normalised, reward, done, infos = venv.step(action.astype(np.float32))
        cut = [info.get("TimeLimit.truncated", False) for info in infos]
        rows.append((venv.get_original_reward(), done, cut, reward))
        sb3_obs.append(normalised)
        obs.append(venv.get_original_obs())
    raw, done, truncated, scaled = (np.array(each) for each in zip(*rows, strict=True))
    return venv, Trajectory(np.array(obs), raw, done, truncated, np.array(sb3_obs), scaled)


def compare_normalisers(task: Task, trajectory: Trajectory, venv: Any) -> None:
    """Ours learn once per rollout, SB3's in every step."""
    agent = our_agent(task)
    scaler = RewardScaler(np.zeros(task.n_envs), gamma=task.gamma, clip=10.0)
    n_steps, shown = task.n_steps, 1
    heading("normalisers, by rollout")
    for number in range(1, len(trajectory.reward) // n_steps + 1):
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


def compare_first_weights(task: Task, model: Any) -> None:
    heading("first weights: deviation of each parameter (both are random)")
    theirs = dict(model.policy.named_parameters())
    for name, (values, _) in our_agent(task).adam.views.items():
        kind = "mean" if name.endswith("log_std") else "deviation"
        sides = (theirs[sb3_name(name)].detach(), values)
        left, right = (float(x.mean() if kind == "mean" else x.std(correction=0)) for x in sides)
        row(f"{kind} of {name}", left, right)


def compare_policy(model: Any, agent: PPOAgent, inputs: PolicyInput) -> Minibatch:
    """Returns the minibatch with SB3's numbers; the advantages are random."""
    obs, mask = inputs.obs, inputs.action_mask
    assert isinstance(obs, torch.Tensor)
    generator = torch.Generator().manual_seed(3)
    masks = {} if mask is None else {"action_masks": mask.numpy()}
    heading("policy, with the same weights")
    with torch.no_grad():
        noise = agent.draw_noise(1, len(obs), generator)[0]
        ours = agent.sample_batch(inputs, noise).action
        distribution = model.policy.get_distribution(obs, **masks)
        if mask is not None:
            theirs = ours  # SB3 draws choices from torch's global generator
        elif agent.config.box_policy == "gsde":
            # SB3 holds its noise as matrices; give it ours, scaled by the standard deviation.
            matrices = noise * model.policy.log_std.exp()
            distribution.exploration_matrices, distribution.exploration_mat = matrices, None
            theirs = distribution.sample()
        else:
            theirs = distribution.distribution.mean + noise * model.policy.log_std.exp()
        outputs, _ = agent.backend.outputs(inputs)
        if mask is None:
            row("sampled action, same noise", theirs, ours)
        else:
            row("probabilities", distribution.distribution.probs, torch.softmax(outputs, dim=-1))
        row("greedy action", distribution.mode(), agent.distribution.mode(outputs))
        value, log_prob, entropy = model.policy.evaluate_actions(obs, theirs, **masks)
        our_log_prob, our_value = agent.score_batch(inputs, theirs)
        _, our_entropy = agent.distribution.log_prob_and_entropy(outputs, theirs)
    row("log-probability", log_prob, our_log_prob)
    row("entropy", entropy, our_entropy)
    row("value", value.flatten(), our_value)
    older = log_prob + 0.1 * torch.randn(len(obs), generator=generator)
    advantage, target = torch.randn(2, len(obs), generator=generator)
    return Minibatch(inputs, theirs, older, value.flatten(), 3.0 * advantage + 1.0, target)


def compare_advantages(task: Task, model: Any, trajectory: Trajectory) -> None:
    """SB3 adds the value of a truncated step's final observation to its reward."""
    from stable_baselines3.common.buffers import RolloutBuffer as SB3Buffer

    n_steps, n_envs = task.n_steps, trajectory.reward.shape[1]
    # The last steps of an episode, so that the rollout holds an end where there is one.
    ends = np.flatnonzero(trajectory.done.any(axis=1))
    first = max(0, int(ends[0]) - n_steps // 2) if len(ends) else 0
    rows = slice(first, first + n_steps)
    reward, done = trajectory.sb3_reward[rows].copy(), trajectory.done[rows]
    truncated = trajectory.truncated[rows].astype(bool)
    random = np.random.default_rng(4)
    value, final = random.normal(size=(2, len(reward) + 1, n_envs)).astype(np.float32)
    buffer = SB3Buffer(
        len(reward), model.observation_space, model.action_space, gamma=task.gamma,
        gae_lambda=task.gae_lambda, n_envs=n_envs,
    )  # fmt: skip
    bootstrapped = np.where(truncated, reward + task.gamma * final[:-1], reward)
    buffer.rewards = bootstrapped.astype(np.float32)
    buffer.values = value[:-1].copy()
    buffer.episode_starts = np.concatenate([np.zeros((1, n_envs)), done[:-1]]).astype(np.float32)
    buffer.compute_returns_and_advantage(torch.from_numpy(value[-1]), done[-1])
    next_value = np.where(truncated, final[:-1], value[1:])
    next_value[done & ~truncated] = 0.0
    ongoing = 1.0 - done
    advantage = gae(reward, value[:-1], next_value, ongoing, gamma=task.gamma, lam=task.gae_lambda)
    ends_of = f"{int(done.sum())} ends, {int(truncated.sum())} of them truncated"
    heading(f"advantages of a rollout with {ends_of}")
    row("advantage", buffer.advantages, advantage)
    row("target of the value", buffer.returns, advantage + value[:-1])


def compare_updates(task: Task, env: Any, batch: Minibatch, *, normalize_advantage: bool) -> None:
    """``PPO.train`` on one minibatch, N_EPOCHS times, and ours."""
    from stable_baselines3.common.logger import Logger

    size = len(batch.action)
    model = sb3_model(task, env, normalize_advantage=normalize_advantage)
    agent = our_agent(task, normalize_advantage=normalize_advantage)
    copy_weights(model, agent)
    model.set_logger(Logger(folder=None, output_formats=[]))
    buffer = model.rollout_buffer
    fields: dict[str, Any] = {
        "observations": batch.inputs.obs,
        "actions": batch.action,
        "log_probs": batch.log_prob,
        "values": batch.value,
        "advantages": batch.advantage,
        "returns": batch.value_target,
    }
    if task.masked:
        fields["action_masks"] = batch.inputs.action_mask
    for name, field in fields.items():
        held = getattr(buffer, name)
        setattr(buffer, name, field.numpy().reshape(held.shape).astype(held.dtype))
    buffer.full, buffer.generator_ready = True, False
    model.train()
    rates = Rates(task.learning_rate, task.clip_range, task.ent_coef)
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
    compare_weights(model, agent)


def sample_normalised(advantage: torch.Tensor) -> torch.Tensor:
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def compare_weights(model: Any, agent: PPOAgent) -> None:
    theirs = dict(model.policy.named_parameters())
    for name, (values, _) in agent.adam.views.items():
        row(name, theirs[sb3_name(name)].detach(), values)


def compare_annealing(rate: float, n_iterations: int = 10) -> None:
    """SB3 anneals after it collects a rollout, we before; so ours is one iteration behind."""
    schedules = Schedules(PPOConfig(learning_rate=rate, learning_rate_schedule="linear"))
    theirs = [rate * (1.0 - (i + 1) / n_iterations) for i in range(n_iterations)]
    ours = [float(schedules.rates(i / n_iterations).learning_rate) for i in range(n_iterations)]
    heading(f"learning rates of {n_iterations} iterations, linear schedule")
    row("learning rate", theirs, ours)
    row("learning rate, ours one iteration later", theirs[:-1], ours[1:])


def compare_iterations(task: Task, venv: Any, n_iterations: int, *, sample_deviation: bool) -> None:
    """SB3 trains; our agent learns from SB3's rollouts in the same order, from the same weights.

    ``sample_deviation``: ours normalises advantages as SB3 does; only plain torch can.
    """
    model = sb3_model(task, venv, whole_batches=False)
    agent = our_agent(task, fast="off" if sample_deviation else "auto")
    copy_weights(model, agent)
    rows: list[Any] = []
    orders: list[Array] = []

    def record(local: dict[str, Any], _: Any) -> bool:
        seen = local["self"]._last_obs, local["self"]._last_episode_starts
        given = local["actions"], local["rewards"], local["dones"]
        # Copies: SB3 changes some of these arrays, and locals() is one dict per rollout.
        others = local.get("action_masks"), local["infos"], local["new_obs"]
        rows.append(deepcopy((*seen, *given, *others)))
        return True  # continue

    def permutation(size: int) -> Array:
        orders.append(drawn := shuffle(size))
        return np.asarray(drawn)

    shuffle = np.random.permutation
    with patch.object(np.random, "permutation", permutation):
        model.learn(n_iterations * task.n_steps * task.n_envs, callback=record)
    buffer = RolloutBuffer(task.n_steps, task.n_envs, agent)
    rates = Rates(task.learning_rate, task.clip_range, task.ent_coef)
    normalised = sample_normalised if sample_deviation else ppo_loss.normalised
    steps = iter(rows)
    n_ends = n_truncated = 0
    for iteration in range(n_iterations):
        buffer.begin(None)
        for t in range(task.n_steps):
            obs, _, action, reward, done, masks, infos, after = next(steps)
            cut = [info.get("TimeLimit.truncated", False) for info in infos]
            truncated = np.array(cut, dtype=bool)
            buffer.obs[""][t] = agent.reader.read(obs)[""]
            if buffer.action_mask is not None:
                buffer.action_mask[t] = masks.astype(bool)
            buffer.action[t] = action
            buffer.reward[t] = reward
            buffer.terminated[t] = done & ~truncated
            buffer.truncated[t] = truncated
            for env in np.flatnonzero(truncated).tolist():
                final = agent.reader.read(infos[env]["terminal_observation"])
                buffer.final_steps[t, env] = FinalObservation(env, final, None)
            n_ends, n_truncated = n_ends + done.sum(), n_truncated + truncated.sum()
        buffer.obs[""][-1] = agent.reader.read(after)[""]
        buffer.finish(gamma=task.gamma, lam=task.gae_lambda)
        for order in orders[iteration * N_EPOCHS : (iteration + 1) * N_EPOCHS]:
            # SB3 numbers the steps of a rollout env by env; we number them row by row.
            column, t_of = np.divmod(order, task.n_steps)
            ours = torch.from_numpy(t_of * task.n_envs + column).view(-1, task.batch_size)
            with patch.object(ppo, "normalised", normalised):
                agent.epoch(buffer.finished(), ours, rates)
    heading(
        f"{n_iterations} iterations on SB3's rollouts, {n_ends} ends, {n_truncated} of them "
        f"truncated, {'the same' if sample_deviation else 'our'} deviation of advantages"
    )
    theirs = model.rollout_buffer
    shape = task.n_envs, task.n_steps
    row("advantage in the last rollout", theirs.advantages.reshape(shape).T, buffer.advantage)
    row("value target in the last rollout", theirs.returns.reshape(shape).T, buffer.value_target)
    compare_weights(model, agent)


def masked_inputs(task: Task, venv: Any) -> PolicyInput:
    """Random states and their masks."""
    size, taxi = task.n_steps * task.n_envs, venv.envs[0].unwrapped
    states = np.random.default_rng(2).integers(0, venv.observation_space.n, size)
    mask = np.array([taxi.action_mask(state) for state in states], dtype=bool)
    return PolicyInput(torch.from_numpy(states), torch.from_numpy(mask), None, None)


def masked_env(task: Task) -> Any:
    from sb3_contrib.common.wrappers import ActionMasker

    def mask(env: Any) -> Array:
        return np.asarray(env.unwrapped.action_mask(env.unwrapped.s), dtype=bool)

    return ActionMasker(gym.make(task.env), mask)


def main() -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), default="mountain_car")
    parser.add_argument("--env", help="another env with Box spaces, at the settings of the task")
    parser.add_argument("--n-envs", type=int, help="instead of the task's")
    parser.add_argument("--steps", type=int, default=20_480, help="of the trajectory, per env")
    parser.add_argument("--iterations", type=int, default=10, help="of SB3's training to repeat")
    args = parser.parse_args()
    torch.set_num_threads(1)
    changed = {name: value for name in ("env", "n_envs") if (value := getattr(args, name))}
    task = TASKS[args.task]._replace(**changed)
    if task.masked:
        venv: Any = DummyVecEnv([lambda: masked_env(task)] * task.n_envs)
    else:
        venv, trajectory = played(task, args.steps)
        compare_normalisers(task, trajectory, venv)
    model = sb3_model(task, venv)
    compare_first_weights(task, model)
    agent = our_agent(task)
    copy_weights(model, agent)
    if task.masked:
        inputs = masked_inputs(task, venv)
    else:
        last = trajectory.sb3_obs[-task.n_steps :].astype(np.float32)
        inputs = PolicyInput(torch.from_numpy(last).flatten(0, 1), None, None, None)
        compare_advantages(task, model, trajectory)
    batch = compare_policy(model, agent, inputs)
    for normalize_advantage in (False, True):
        compare_updates(task, venv, batch, normalize_advantage=normalize_advantage)
    for sample_deviation in (True, False):
        compare_iterations(task, venv, args.iterations, sample_deviation=sample_deviation)
    compare_annealing(task.learning_rate)


if __name__ == "__main__":
    main()
