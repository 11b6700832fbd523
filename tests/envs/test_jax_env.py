"""JaxVectorEnv: envs written in JAX, beside the loops of their libraries; whole runs in them."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="needs the extra: make jax")

from gymnasium.utils.env_checker import check_env as gymnasium_check  # noqa: E402
from jax_tasks import Forbidding, Reach, TypedKey, Walk, WalkResetInParts  # noqa: E402
from small_agents import Played, agent_in  # noqa: E402
from stopped_runs import assert_same_runs, stopped_run  # noqa: E402

from ml_pipeline import train  # noqa: E402
from ml_pipeline.__main__ import main  # noqa: E402
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole  # noqa: E402
from ml_pipeline.envs.jax_libraries import Brax, Craftax, Gymnax  # noqa: E402
from ml_pipeline.errors import UserError  # noqa: E402
from ml_pipeline.training.graphs import Programs  # noqa: E402

SMALL = ["logger=none", "total_steps=256", "n_envs=4", "agent.n_steps=16"]
GYMNAX = ["env=gymnax", "+env.kwargs.params.max_steps_in_episode=12", *SMALL]
ENV = "CartPole-v1"


def needs(package: str) -> Any:
    reason = f"{package} is not installed; see docs/jax_envs.md"
    return pytest.importorskip(package, reason=reason)


split = jax.jit(lambda keys: jax.vmap(jax.random.split)(keys).swapaxes(0, 1))


def keys_of(seed: int, n_envs: int) -> Any:
    """The key of each env, and one to begin its first episode."""
    return split(jax.vmap(jax.random.PRNGKey)(seed + np.arange(n_envs)))


def actions(t: int, env: Any) -> torch.Tensor:
    generator = np.random.default_rng(t)
    drawn = [_drawn(generator, env.single_action_space) for _ in range(env.num_envs)]
    return torch.as_tensor(np.array(drawn))


def _drawn(generator: np.random.Generator, space: Any) -> Any:
    if hasattr(space, "n"):
        return generator.integers(space.n)
    return generator.uniform(space.low, space.high).astype(np.float32)


def same(ours: torch.Tensor, theirs: Any) -> bool:
    """Equal, up to rounding: XLA fuses the same operations in another way in another program."""
    theirs = np.asarray(theirs)
    if theirs.dtype == bool:
        return np.array_equal(ours.numpy(), theirs)
    return np.allclose(ours.numpy(), theirs, rtol=1e-5, atol=2e-6)


def test_gymnax_gives_the_transitions_of_its_own_loop() -> None:
    gymnax = needs("gymnax")
    n_envs, n_ended, n_cut = 16, 0, 0
    theirs, params = gymnax.make(ENV)
    params = params.replace(max_steps_in_episode=25)
    step = jax.jit(jax.vmap(theirs.step, (0, 0, 0, None)))
    keys, begin_keys = keys_of(7, n_envs)
    obs, state = jax.jit(jax.vmap(theirs.reset, (0, None)))(begin_keys, params)
    env = Gymnax(n_envs, task_id=ENV, params={"max_steps_in_episode": 25}, seed=7)
    first, _ = env.reset()
    assert same(first, obs)

    for t in range(1000):
        action = actions(t, env)
        keys, step_keys = split(keys)
        obs, state, *theirs_now, info = step(step_keys, state, action.numpy(), params)
        ours = env.step(action)

        assert same(ours[0], obs), t
        assert all(same(a, b) for a, b in zip(ours[1:4], theirs_now, strict=True)), t
        assert same(ours[4]["final_obs"], info["final_observation"]), t
        n_ended += int(ours[2].sum())
        n_cut += int(ours[3].sum())
    assert n_ended > 100
    assert n_cut > 100


@pytest.mark.slow
def test_craftax_gives_the_transitions_of_its_own_loop() -> None:
    needs("craftax")
    from craftax.craftax_env import make_craftax_env_from_name

    task_id, n_envs, limit, n_cut = "Craftax-Classic-Symbolic-v1", 3, 90, 0
    theirs = make_craftax_env_from_name(task_id, auto_reset=True)
    params = theirs.default_params.replace(max_timesteps=limit)
    step = jax.jit(jax.vmap(theirs.step, (0, 0, 0, None)))
    keys, begin_keys = keys_of(7, n_envs)
    obs, state = jax.jit(jax.vmap(theirs.reset, (0, None)))(begin_keys, params)
    env = Craftax(n_envs, task_id=task_id, params={"max_timesteps": limit}, seed=7)
    first, _ = env.reset()
    assert same(first, obs)

    for t in range(1000):
        action = actions(t, env)
        keys, step_keys = split(keys)
        obs, state, reward, done, _ = step(step_keys, state, action.numpy(), params)
        ours = env.step(action)

        assert same(ours[0], obs), t
        assert same(ours[1], reward), t
        assert same(ours[2] | ours[3], done), t
        n_cut += int((ours[3] & ~ours[2]).sum())
    assert n_cut > 10


def rows_where(done: Any, new: Any, old: Any) -> Any:
    return np.where(np.asarray(done).reshape(-1, *[1] * (new.ndim - 1)), new, old)


@pytest.mark.slow
def test_brax_gives_the_transitions_of_its_own_loop() -> None:
    envs = needs("brax.envs")
    n_envs, limit, n_cut = 3, 15, 0
    options = {"backend": "spring"}
    theirs = envs.create("inverted_pendulum", episode_length=limit, auto_reset=False, **options)
    begin, step = jax.jit(jax.vmap(theirs.reset)), jax.jit(jax.vmap(theirs.step))
    keys, begin_keys = keys_of(7, n_envs)
    state = begin(begin_keys)
    env = Brax(n_envs, task_id="inverted_pendulum", max_episode_steps=limit, seed=7, **options)
    first, _ = env.reset()
    assert same(first, state.obs)

    for t in range(1000):
        action = actions(t, env)
        keys, step_keys = split(keys)
        _, begin_keys = split(step_keys)
        state = step(state, action.numpy())
        obs, reward, terminated, truncated, infos = env.step(action)

        assert same(infos["final_obs"], state.obs), t
        assert same(reward, state.reward), t
        assert same(terminated | truncated, state.done.astype(bool)), t
        assert same(truncated & ~terminated, state.info["truncation"].astype(bool)), t
        if state.done.any():
            fresh, done = begin(begin_keys), state.done.astype(bool)
            state = jax.tree.map(partial(rows_where, done), fresh, state)
        assert same(obs, state.obs), t
        n_cut += int((truncated & ~terminated).sum())
    assert n_cut > 10


def played(env: Any, n_steps: int, first: int = 0) -> list[list[Any]]:
    rows = []
    for t in range(first, first + n_steps):
        obs, *rest, infos = env.step(actions(t, env))
        rows.append([each.tolist() for each in (obs, *rest, infos["final_obs"])])
    return rows


def test_resetting_a_part_at_a_time_changes_nothing() -> None:
    whole, parts = Walk(6, seed=1), WalkResetInParts(6, seed=1)
    whole.reset()
    parts.reset()

    rows = played(whole, 200)

    assert rows == played(parts, 200)
    n_ended = [sum(row[2]) + sum(row[3]) for row in rows]
    assert max(n_ended) > 1  # more than the part of one reset


def test_an_env_does_not_depend_on_the_number_of_envs() -> None:
    few, many = Walk(2, seed=5), Walk(9, seed=5)
    few.reset()
    many.reset()

    for _ in range(60):
        ours = few.step(torch.ones(2, dtype=torch.int64))
        theirs = many.step(torch.ones(9, dtype=torch.int64))
        assert all(torch.equal(a, b[:2]) for a, b in zip(ours[:4], theirs[:4], strict=True))


def test_observations_of_several_arrays_are_one_vector() -> None:
    env = Walk(3, seed=1)
    env.reset()

    obs, reward, *_ = env.step(torch.tensor([1, 0, 1]))

    assert env.single_observation_space.shape == (3,)
    assert torch.equal(obs[:, 0], reward)
    assert obs[:, 1:].tolist() == [[1.0, -1.0], [0.0, 0.0], [1.0, -1.0]]


def test_a_limit_truncates_and_keeps_the_true_final_observation() -> None:
    env = Reach(2, seed=1, max_episode_steps=3)
    env.reset()
    for _ in range(2):
        obs, *_ = env.step(torch.zeros(2, 2))

    after, _, terminated, truncated, infos = env.step(torch.ones(2, 2))

    assert truncated.all()
    assert not terminated.any()
    assert torch.allclose(infos["final_obs"], obs + 0.1)
    assert not torch.allclose(after, infos["final_obs"])
    assert infos["episode"]["l"].tolist() == [3, 3]


@pytest.mark.parametrize("task", [Walk, TypedKey, Reach])
def test_a_saved_env_continues_in_mid_episode(task: Any) -> None:
    env, other = task(3, seed=1), task(3, seed=99)
    env.reset()
    played(env, 7)

    other.load_state_dict(env.state_dict())

    assert played(other, 50, first=7) == played(env, 50, first=7)


def test_a_state_of_another_task_is_refused() -> None:
    env, other, fewer = Walk(3, seed=1), Reach(3, seed=1), Walk(2, seed=1)
    env.reset()

    with pytest.raises(ValueError, match="Reach has another state than the saved one"):
        other.load_state_dict(env.state_dict())
    with pytest.raises(ValueError, match="the saved state has 3 envs; use num_envs=3"):
        fewer.load_state_dict(env.state_dict())


def test_a_single_env_is_env_0_and_passes_the_check_of_gymnasium() -> None:
    batch, one = Reach(2, seed=4), Reach.single_env()
    batch.reset()
    one.reset(seed=4)

    for t in range(9):
        action = actions(t, batch)
        ours, theirs = one.step(action[0].numpy()), batch.step(action)
        assert ours[0].tolist() == theirs[4]["final_obs"][0].tolist()
        assert ours[1:4] == tuple(each[0].item() for each in theirs[1:4])
    assert not ours[3]
    assert one.step(action[0].numpy())[3]  # its tenth step is the last
    gymnasium_check(Walk.single_env(), skip_render_check=True)


def test_a_policy_never_takes_an_action_that_the_task_forbids(here: Path) -> None:
    env, one = Forbidding(2, seed=4), Forbidding.single_env()
    _, infos = env.reset()
    _, info = one.reset(seed=4)
    for t in range(5):
        assert infos["action_mask"][0].tolist() == info["action_mask"].tolist()
        assert info["action_mask"].tolist() == [action != t % 3 for action in range(3)]
        *_, infos = env.step(torch.tensor([0, 0]))
        *_, info = one.step(0)
    assert infos["action_mask"].tolist() == [[False, True, True]] * 2  # of the next episode
    assert info["action_mask"].tolist() == [True, True, False]  # of the last observation

    rows = rows_of(train("env.target=jax_tasks.Forbidding", *SMALL).run_dir)

    assert {row["rollout/episode_return"] for row in rows} == {"5.0"}
    assert rows[-1]["eval/episode_return"] == "5.0"


class Noting(Programs):
    """Notes what it would compile or capture, and runs it as it is."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.names: list[str] = []

    def compiled(self, function: Any, name: str) -> Any:
        self.names.append(name)
        return function

    def captured(self, function: Any, name: str, generators: Any = ()) -> Any:
        self.names.append(name)
        return function


def test_a_rollout_is_neither_compiled_nor_captured_with_its_envs() -> None:
    names = []
    for env in (TorchCartPole(4, seed=1), Walk(4, seed=1)):
        programs = Noting()
        Played(env, 8, agent_in(env), programs=programs).collect()
        names.append(programs.names)

    of_torch, of_jax = map(set, names)
    assert of_torch - of_jax == {"a rollout", "a step of TorchCartPole"}
    assert of_jax - of_torch == {"acting"}


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_runs_train_and_evaluate_with_other_seeds(agent: str, here: Path, capsys: Any) -> None:
    words = ["agent=dqn", "agent.learning_starts=64"] if agent == "dqn" else ["agent.n_steps=16"]
    env = [each for each in GYMNAX if not each.startswith("agent.")]

    result = train(*env, *words, "callbacks.evaluation.eval_every_steps=128")

    said = capsys.readouterr().out
    assert "4 tensor envs, cpu" in said
    assert "if resumed" not in said
    evaluated = [row["eval/episode_length"] for row in rows_of(result.run_dir)]
    assert any(evaluated)
    assert main(["evaluate", str(result.run_dir), "--episodes", "3", "--seed", "77"]) == 0
    assert "3 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "network", [[], ["network=lstm", "agent.n_minibatches=2"]], ids=["mlp", "lstm"]
)
def test_a_killed_run_resumes_bit_for_bit(network: list[str], here: Path) -> None:
    settings = [*GYMNAX, *network, "~callbacks.evaluation"]
    killed = stopped_run([*settings, "callbacks.checkpoints.every_steps=64"], "kill", iteration=3)

    train(f"resume={killed}")

    whole = train(*settings, "callbacks.checkpoints.every_steps=64").run_dir
    assert_same_runs(killed, whole)
    assert [row["env_steps"] for row in rows_of(whole)] == ["64", "128", "192", "256"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["env=gymnax", "env.kwargs.task_id=CartPole-v2"],
            "task_id=CartPole-v2: gymnax has no such task; did you mean CartPole-v1",
        ),
        (
            ["env=gymnax", "+env.kwargs.params.gravitation=1.0"],
            "params.gravitation: the task has no such parameter; it has .*gravity",
        ),
        (["env=gymnax", "+env.kwargs.size=1"], "unexpected keyword argument 'size'"),
        (["env.target=jax_tasks.LateNan"], "not finite"),
        (["env.target=jax_tasks.NoActions"], "NoActions has no single_action_space; set it to"),
        (["env.target=jax_tasks.ThreeValues"], "ThreeValues.advance fails: ValueError: not enough"),
        (
            ["env.target=jax_tasks.GrowingState"],
            r"GrowingState.advance must return a state .*\[0\]: int32\[\] in the place of",
        ),
        (
            ["env.target=jax_tasks.Raising"],
            r"Raising.begin fails: KeyError: 'no such map' \(jax_tasks.py:\d+ in begin\)",
        ),
        (["env.target=jax_tasks.Walk", "device=mps"], "device=mps"),
    ],
)
def test_mistakes_are_named_in_one_line(words: list[str], error: str, here: Path) -> None:
    with pytest.raises(UserError, match=error) as caught:
        train(*words, *SMALL, "~callbacks.evaluation", quiet=True)

    assert "\n" not in str(caught.value)


def test_an_env_whose_reset_starts_no_episode_is_named(here: Path, capsys: Any) -> None:
    train("env.target=jax_tasks.ResetsNothing", *SMALL, "~callbacks.evaluation")

    assert "env ResetsNothing: its last" in capsys.readouterr().out


def test_check_env_plays_a_preset(here: Path, capsys: Any) -> None:
    assert (
        main(["check-env", "env=gymnax", "env.kwargs.task_id=Pendulum-v1", "--seconds", "1"]) == 0
    )

    said = capsys.readouterr().out
    assert "observation space: Box(-inf, inf, (3,), float32)" in said
    assert "ready to train" in said


def test_check_env_suggests_a_limit_that_the_env_takes(here: Path, capsys: Any) -> None:
    key = "+env.kwargs.max_episode_steps"
    assert main(["check-env", "jax_tasks.Endless", "--seconds", "0.1"]) == 0
    assert f"give it a limit: {key}=1000" in capsys.readouterr().out

    assert main(["check-env", "jax_tasks.Endless", f"{key}=3", "--seconds", "1"]) == 0
    assert "give it a limit" not in capsys.readouterr().out
