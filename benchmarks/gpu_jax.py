"""JAX reference for benchmarks/gpu.py: the same PPO on CartPole, jitted as a whole.

    python benchmarks/gpu_jax.py                                  # needs jax with its GPU plugin
    python benchmarks/gpu_jax.py --sizes 2048x32 --precisions tf32

Our own program in the style of PureJaxRL: env steps, GAE, epochs and minibatches are scans, and one
jitted function runs many iterations. Networks, sizes, epochs and minibatches are those of gpu.py.
So it shows the speed of JAX on this machine, also in float32; JAX multiplies in tf32 by default.
As in PureJaxRL, the value loss is clipped, the time limit terminates an episode, and the host reads
the results of many iterations at once. gpu.py bootstraps after the time limit and reads its metrics
in every iteration. This program first trains in JAX's default precision. It times nothing unless
the mean episode length reaches 475.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    from jax import lax, random
except ImportError:
    raise SystemExit('jax is not installed; run python -m pip install "jax[cuda13]"') from None

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SIZES = ("2048x32", "8192x32", "32768x32", "131072x16")
PRECISIONS = {"tf32": "tensorfloat32", "float32": "float32"}  # JAX's names
N_EPOCHS, N_MINIBATCHES = 4, 4
GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.5, 0.01, 0.5
SOLVED = 475.0

Params = Any  # a tree of arrays


class Envs(NamedTuple):
    state: jax.Array  # [N, 4]
    length: jax.Array  # [N], steps so far in the current episode


class Step(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    value: jax.Array
    log_prob: jax.Array
    ended_length: jax.Array  # length of an episode that ended, else 0


def begin(key: jax.Array, n_envs: int) -> jax.Array:
    return random.uniform(key, (n_envs, 4), minval=-0.05, maxval=0.05)


def env_step(key: jax.Array, envs: Envs, action: jax.Array) -> tuple[Envs, jax.Array, jax.Array]:
    """CartPole-v1; finished episodes reset within the same step."""
    x, x_dot, theta, theta_dot = envs.state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
    theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc
    length = envs.length + 1
    limit = 12 * 2 * math.pi / 360
    done = (jnp.abs(x) > 2.4) | (jnp.abs(theta) > limit) | (length >= 500)
    moved = jnp.stack((x, x_dot, theta, theta_dot), axis=1)
    state = jnp.where(done[:, None], begin(key, len(done)), moved)
    return Envs(state, jnp.where(done, 0, length)), done, jnp.where(done, length, 0)


def new_params(key: jax.Array) -> Params:
    def tower(key: jax.Array, n_out: int, gain: float) -> list[tuple[jax.Array, jax.Array]]:
        sizes = [(4, 64, math.sqrt(2)), (64, 64, math.sqrt(2)), (64, n_out, gain)]
        keys = random.split(key, 3)
        return [
            (jax.nn.initializers.orthogonal(scale)(key, (n_in, n_out)), jnp.zeros(n_out))
            for key, (n_in, n_out, scale) in zip(keys, sizes, strict=True)
        ]

    actor, critic = random.split(key)
    return tower(actor, 2, 0.01), tower(critic, 1, 1.0)


def apply(tower: Params, x: jax.Array) -> jax.Array:
    for weight, bias in tower[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = tower[-1]
    return x @ weight + bias


def policy(params: Params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the actions, and values."""
    return jax.nn.log_softmax(apply(params[0], obs)), apply(params[1], obs)[:, 0]


def rollout(
    params: Params, envs: Envs, key: jax.Array, n_steps: int
) -> tuple[Envs, jax.Array, Step]:
    def step(carry: tuple[Envs, jax.Array], _: None) -> tuple[tuple[Envs, jax.Array], Step]:
        envs, key = carry
        key, act_key, env_key = random.split(key, 3)
        logits, value = policy(params, envs.state)
        action = random.categorical(act_key, logits)
        log_prob = jnp.take_along_axis(logits, action[:, None], axis=1)[:, 0]
        after, done, ended_length = env_step(env_key, envs, action)
        reward = jnp.ones_like(value)
        seen = Step(envs.state, action, reward, done, value, log_prob, ended_length)
        return (after, key), seen

    (envs, key), steps = lax.scan(step, (envs, key), None, n_steps)
    return envs, key, steps


def gae(steps: Step, last_value: jax.Array) -> jax.Array:
    def back(carry: tuple[jax.Array, jax.Array], step: Step) -> tuple[Any, jax.Array]:
        running, next_value = carry
        not_done = 1.0 - step.done
        delta = step.reward + GAMMA * next_value * not_done - step.value
        running = delta + GAMMA * LAMBDA * not_done * running
        return (running, step.value), running

    start = jnp.zeros_like(last_value), last_value
    return lax.scan(back, start, steps, reverse=True, unroll=16)[1]


def loss(params: Params, batch: tuple[Step, jax.Array, jax.Array]) -> jax.Array:
    step, advantage, target = batch
    logits, value = policy(params, step.obs)
    log_prob = jnp.take_along_axis(logits, step.action[:, None], axis=1)[:, 0]
    near = step.value + jnp.clip(value - step.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
    ratio = jnp.exp(log_prob - step.log_prob)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * gain
    policy_loss = -jnp.minimum(ratio * gain, clipped).mean()
    entropy = -(jnp.exp(logits) * logits).sum(axis=1).mean()
    return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy


def adam(params: Params, grads: Params, moments: Any, rate: jax.Array) -> tuple[Params, Any]:
    """One Adam step with a clipped gradient norm."""
    mean, square, count = moments
    tree_map, count = jax.tree.map, count + 1
    norm = jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, MAX_GRAD_NORM / (norm + 1e-6))
    mean = tree_map(lambda m, g: 0.9 * m + 0.1 * scale * g, mean, grads)
    square = tree_map(lambda s, g: 0.999 * s + 0.001 * (scale * g) ** 2, square, grads)
    first, second = 1.0 - 0.9**count, 1.0 - 0.999**count
    params = tree_map(
        lambda p, m, s: p - rate * (m / first) / (jnp.sqrt(s / second) + 1e-5), params, mean, square
    )
    return params, (mean, square, count)


def iterations(n_steps: int, n_iterations: int, learning_rate: float, n_total: int) -> Any:
    """A jitted function of many iterations: carry -> (carry, mean episode lengths)."""

    def minibatch(carry: Any, batch: Any) -> tuple[Any, None]:
        params, moments, rate = carry
        grads = jax.grad(loss)(params, batch)
        params, moments = adam(params, grads, moments, rate)
        return (params, moments, rate), None

    def epoch(carry: Any, _: None) -> tuple[Any, None]:
        (params, moments, rate), key, rollout_ = carry
        key, order_key = random.split(key)
        size = rollout_[1].shape[0]
        order = random.permutation(order_key, size)
        batches = jax.tree.map(
            lambda x: jnp.take(x, order, axis=0).reshape(N_MINIBATCHES, -1, *x.shape[1:]), rollout_
        )
        learned, _ = lax.scan(minibatch, (params, moments, rate), batches)
        return (learned, key, rollout_), None

    def iteration(carry: Any, _: None) -> tuple[Any, jax.Array]:
        params, moments, envs, key, done = carry
        envs, key, steps = rollout(params, envs, key, n_steps)
        advantage = gae(steps, policy(params, envs.state)[1])
        flat = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (steps, advantage, advantage + steps.value)
        )
        rate = learning_rate * (1.0 - done / n_total)
        learned, key, _ = lax.scan(epoch, ((params, moments, rate), key, flat), None, N_EPOCHS)[0]
        n_ended = (steps.ended_length > 0).sum()
        length = steps.ended_length.sum() / jnp.maximum(n_ended, 1)
        return (*learned[:2], envs, key, done + 1), length

    return jax.jit(lambda carry: lax.scan(iteration, carry, None, n_iterations))


def start(n_envs: int, seed: int = 1) -> Any:
    params_key, env_key, key = random.split(random.key(seed), 3)
    params = new_params(params_key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    envs = Envs(begin(env_key, n_envs), jnp.zeros(n_envs, jnp.int32))
    return params, (zeros, zeros, jnp.zeros(())), envs, key, jnp.zeros(())


def learn() -> float:
    """Best mean episode length of an iteration, at the training settings of gpu.py."""
    lengths = iterations(32, 200, 1e-3, 10_000)(start(2048))[1]
    return float(lengths.max())


def timed(size: str, rounds: int) -> dict[str, float]:
    n_envs, n_steps = map(int, size.split("x"))
    n_iterations = max(4, int(4e7 / (n_envs * n_steps)))
    run, carry = iterations(n_steps, n_iterations, 2.5e-4, 1_000_000), start(n_envs)
    begin_ = time.perf_counter()
    carry, lengths = jax.block_until_ready(run(carry))
    setup, seconds = time.perf_counter() - begin_, []
    for _ in range(rounds):
        begin_ = time.perf_counter()
        carry, lengths = jax.block_until_ready(run(carry))
        lengths.tolist()
        seconds.append((time.perf_counter() - begin_) / n_iterations)
    typical = statistics.median(seconds)
    speed = n_envs * n_steps / typical / 1e6
    return {"ms": typical * 1e3, "million_steps_per_second": speed, "setup_seconds": setup}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", default=["tf32", "float32"], choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="output folder")
    args = parser.parse_args()
    if jax.default_backend() == "cpu":
        raise SystemExit("jax found no GPU; install its GPU plugin, for example jax[cuda13]")
    found: dict[str, Any] = {
        "date": str(date.today()),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "timed": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    length = found["learned_length"] = learn()
    print(f"learned: mean episode length {length:.1f}")
    if length < SOLVED:
        raise SystemExit(f"CartPole is not solved (episode length < {SOLVED}); no timing")
    print("| size | precision | M steps/s | ms |")
    print("|---|---|---|---|")
    for precision in args.precisions:
        for size in args.sizes:
            with jax.default_matmul_precision(PRECISIONS[precision]):
                row: dict[str, Any] = {"size": size, "precision": precision}
                row |= timed(size, args.rounds)
            found["timed"].append(row)
            speed = row["million_steps_per_second"]
            print(f"| {size} | {precision} | {speed:.1f} | {row['ms']:.2f} |", flush=True)
            (args.out / "gpu_jax.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
