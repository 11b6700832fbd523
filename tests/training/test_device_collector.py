"""TensorCollector and TensorBuffer: what a rollout on the device holds, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_torch_envs import Drift, Endless, Places
from torch import Tensor

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.tensor_tasks.cartpole import TorchCartPole
from ml_pipeline.protocols import PolicyInput
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.tensor.buffer import TensorBuffer
from ml_pipeline.training.tensor.collector import TensorCollector

CPU = torch.device("cpu")


def agent_of(env: TorchVectorEnv, by_hand: bool = True, **options: Any) -> PPOAgent:
    spaces = env.single_observation_space, env.single_action_space
    config = PPOConfig(**options)
    return PPOAgent(*spaces, MLP, config, device=CPU, seed=1, by_hand=by_hand)


class Played:
    """A collector, its agent and its buffer."""

    def __init__(
        self, env: TorchVectorEnv, n_steps: int, noise_seed: int = 2, **options: Any
    ) -> None:
        self.agent = agent_of(env, **options)
        self.collector = TensorCollector(
            env, env_seed=10, noise_seed=noise_seed, programs=Programs(CPU)
        )
        self.buffer = self.collector.new_buffer(n_steps, self.agent)
        self.scaler = self.collector.new_scaler(self.agent.config)
        self.n_steps = n_steps

    def again(self) -> Any:
        """One more rollout; its buffer's tensors hold it until the next."""
        stats = self.collector.collect(self.agent, self.buffer)
        self.collector.commit(self.n_steps)
        return stats

    def finish(self, gamma: float, lam: float) -> None:
        last = self.collector.last_inputs(self.agent)
        self.buffer.finish(last, gamma=gamma, lam=lam, scaler=self.scaler)

    def tensors(self) -> list[Tensor]:
        buffer = self.buffer
        fields = (buffer.obs, buffer.final_obs, buffer.action, buffer.reward)
        return [each.clone() for each in (*fields, buffer.terminated, buffer.truncated)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def test_a_rollout_holds_each_number_in_its_place() -> None:
    played = Played(Places(2), n_steps=5)

    played.again()

    buffer = played.buffer
    # Env 0 ends with its fourth step, env 1 with its third; what follows is a new beginning.
    assert buffer.obs[..., 0].tolist() == [[0, 1], [10, 11], [20, 21], [30, 1], [0, 11], [10, 21]]
    assert buffer.reward.tolist() == [[10, 11], [20, 21], [30, 31], [40, 11], [10, 21]]
    assert buffer.final_obs[..., 0].tolist() == buffer.reward.tolist()
    assert buffer.terminated.tolist() == [
        [False, False],
        [False, False],
        [False, True],
        [True, False],
        [False, False],
    ]
    assert not buffer.truncated.any()
    assert set(buffer.action.flatten().tolist()) <= {0, 1, 2}


def test_a_time_limit_truncates_and_leaves_the_final_observation() -> None:
    played = Played(Endless(2), n_steps=4)

    played.again()

    buffer = played.buffer
    assert buffer.truncated.tolist() == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert not buffer.terminated.any()
    assert buffer.final_obs[2, :, 0].tolist() == [30.0, 31.0]
    assert buffer.obs[3, :, 0].tolist() == [0.0, 1.0]


def test_the_next_rollout_goes_on_where_the_one_before_has_ended() -> None:
    played = Played(Places(2), n_steps=2)

    seen = []
    for _ in range(3):
        played.again()
        seen.append(played.buffer.obs[..., 0].tolist())

    assert seen == [
        [[0, 1], [10, 11], [20, 21]],
        [[20, 21], [30, 1], [0, 11]],
        [[0, 11], [10, 21], [20, 1]],
    ]
    assert played.collector.n_steps == 6


def test_two_rollouts_are_one_of_twice_the_length() -> None:
    short, long = Played(Places(3), n_steps=4), Played(Places(3), n_steps=8)
    short.again()
    first = short.tensors()
    short.again()
    long.again()

    # Observations and rewards do not depend on what is done, and the draws differ.
    for place in (1, 3, 4, 5):
        joined = torch.cat([first[place], short.tensors()[place]])
        assert torch.equal(joined, long.tensors()[place])


@pytest.mark.parametrize("make_env", [TorchCartPole, Drift, Places, Endless])
def test_what_is_told_of_episodes_is_what_a_plain_loop_finds(make_env: Any) -> None:
    played, plain = Played(make_env(5), n_steps=40), make_env(5)
    plain.reset(seed=10)

    for _ in range(2):
        stats = played.again()
        returns: list[float] = []
        lengths: list[int] = []
        to_env = played.agent.distribution.to_torch_env
        for t in range(40):
            _, reward, terminated, truncated, infos = plain.step(to_env(played.buffer.action[t]))
            assert torch.equal(reward, played.buffer.reward[t])
            assert torch.equal(infos["final_obs"], played.buffer.final_obs[t])
            returns += infos["episode"]["r"][terminated | truncated].tolist()
            lengths += infos["episode"]["l"][terminated | truncated].tolist()

        (told,) = stats.episodes
        assert told.n == len(returns) > 0
        assert told.episode_return == pytest.approx(sum(returns) / len(returns), rel=1e-5)
        assert told.length == pytest.approx(sum(lengths) / len(lengths))


def test_the_means_of_episodes_can_be_done_by_hand() -> None:
    played = Played(Places(2), n_steps=4)

    (told,) = played.again().episodes

    # Env 0: 10 + 20 + 30 + 40 in four steps; env 1: 11 + 21 + 31 in three.
    assert told == ((100.0 + 63.0) / 2, 3.5, 2)


def test_a_rollout_without_an_end_tells_of_no_episode() -> None:
    assert Played(Places(2), n_steps=2).again().episodes == []


def values(agent: PPOAgent, obs: Tensor) -> Tensor:
    """Of [T, n_envs, *obs], by the agent itself."""
    flat = obs.flatten(0, 1)
    return agent.value_batch(PolicyInput(flat, None, None, None)).view(obs.shape[:2])


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("make_env", [Places, Endless, Drift])
def test_one_step_targets_bootstrap_by_why_the_step_was_the_last(
    make_env: Any, by_hand: bool
) -> None:
    played = Played(make_env(3), n_steps=6, by_hand=by_hand)
    played.again()

    played.finish(gamma=0.5, lam=0.0)  # so that a target is reward + gamma * V(successor)

    buffer = played.buffer
    followed, final = values(played.agent, buffer.obs[1:]), values(played.agent, buffer.final_obs)
    successor = torch.where(buffer.truncated, final, followed).masked_fill(buffer.terminated, 0.0)
    target = buffer.learned.value_target.view(6, 3)
    torch.testing.assert_close(target, buffer.reward + 0.5 * successor, rtol=1e-5, atol=1e-5)
    assert (buffer.terminated | buffer.truncated).any()


def test_a_truncated_step_is_worth_its_reward_and_the_value_of_the_final_observation() -> None:
    played = Played(Endless(1), n_steps=3)
    played.again()

    played.finish(gamma=0.5, lam=1.0)

    value = played.agent.value_batch(PolicyInput(torch.tensor([[30.0]]), None, None, None)).item()
    expected = 10.0 + 0.5 * (20.0 + 0.5 * (30.0 + 0.5 * value))
    assert played.buffer.learned.value_target[0].item() == pytest.approx(expected, rel=1e-5)


def test_what_is_learned_from_is_scored_by_the_agent_and_lies_flat() -> None:
    played = Played(Drift(3), n_steps=4)
    played.again()
    played.finish(gamma=0.9, lam=0.9)

    learned, buffer = played.buffer.learned, played.buffer

    log_prob, value = played.agent.score_batch(learned.inputs, learned.action)
    assert torch.equal(learned.inputs.obs, buffer.obs[:4].reshape(12, 2))  # type: ignore[arg-type]
    assert torch.equal(learned.action, buffer.action.reshape(12, 1))
    assert torch.equal(learned.log_prob, log_prob)
    assert torch.equal(learned.value, value)
    assert torch.equal(learned.advantage, buffer.advantage.flatten())
    torch.testing.assert_close(learned.value_target, learned.advantage + learned.value)
    assert torch.equal(buffer.obs_tensors(), buffer.obs[:4])


def test_the_facts_are_the_critics_quality_and_whether_all_was_finite() -> None:
    played = Played(Places(2), n_steps=4)
    played.again()
    played.finish(gamma=0.9, lam=0.9)
    target, value = played.buffer.learned.value_target, played.buffer.learned.value
    expected = 1.0 - ((target - value).var() / target.var()).item()

    assert played.buffer.facts().tolist() == pytest.approx([expected, 1.0], rel=1e-4)

    played.buffer.reward[1, 1] = torch.nan
    played.finish(gamma=0.9, lam=0.9)
    assert played.buffer.facts()[1].item() == 0.0


def test_scaled_rewards_change_the_targets_and_not_the_rewards_that_are_kept() -> None:
    played = Played(Places(2), n_steps=4, scale_reward=True)
    played.again()
    before = played.buffer.reward.clone()

    played.finish(gamma=0.0, lam=0.0)  # so that a target is the scaled reward

    assert torch.equal(played.buffer.reward, before)
    target = played.buffer.learned.value_target.view(4, 2)
    ratio = target / before
    torch.testing.assert_close(ratio, ratio[0, 0].expand(4, 2), rtol=1e-4, atol=0.0)
    assert 0.0 < ratio[0, 0] < 1.0


@pytest.mark.parametrize("make_env", [TorchCartPole, Drift])
def test_the_same_seeds_give_the_same_rollouts_bit_for_bit_and_others_do_not(make_env: Any) -> None:
    ours, again, other = (Played(make_env(4), 16, noise_seed=seed) for seed in (2, 2, 3))

    for _ in range(2):
        for each in (ours, again, other):
            each.again()
        assert same(ours.tensors(), again.tensors())
        assert not torch.equal(ours.buffer.action, other.buffer.action)


def test_two_rollouts_of_one_run_have_draws_of_their_own() -> None:
    played = Played(Places(8), n_steps=12)  # whole episodes: both begin alike
    played.again()
    first = played.tensors()
    played.again()

    assert torch.equal(first[0], played.buffer.obs)
    assert not torch.equal(first[2], played.buffer.action)


@pytest.mark.parametrize("make_env", [TorchCartPole, Drift])
def test_a_loaded_collector_goes_on_in_the_midst_of_the_episodes(make_env: Any) -> None:
    ours, other = Played(make_env(4), n_steps=5), Played(make_env(4), n_steps=5, noise_seed=9)
    ours.again()
    state = ours.collector.state_dict()
    ours.again()

    other.collector.load_state_dict(state)
    other.collector.resume_at(state["position"], [], other.agent)
    other.again()

    assert same(ours.tensors(), other.tensors())
    assert other.collector.n_steps == 10
    assert ours.collector.snapshots() == []


def test_a_collector_that_was_resumed_and_has_not_played_can_be_saved_again() -> None:
    ours, other, third = (Played(Drift(4), n_steps=5) for _ in range(3))
    ours.again()
    state = ours.collector.state_dict()
    other.collector.load_state_dict(state)
    other.collector.resume_at(state["position"], [], other.agent)

    again = other.collector.state_dict()
    third.collector.load_state_dict(again)
    third.collector.resume_at(again["position"], [], third.agent)
    for each in (ours, third):
        each.again()

    assert same(ours.tensors(), third.tensors())


def test_a_collector_that_has_played_on_can_be_sent_back() -> None:
    ours, other = (Played(Drift(4), n_steps=5) for _ in range(2))
    for _ in range(2):
        ours.again()
    state = ours.collector.state_dict()
    for _ in range(3):
        other.again()

    other.collector.load_state_dict(state)
    other.collector.resume_at(state["position"], [], other.agent)
    for each in (ours, other):
        each.again()

    assert same(ours.tensors(), other.tensors())


def test_a_rollout_that_was_not_learned_from_leaves_no_trace_in_the_state() -> None:
    played = Played(Places(2), n_steps=3)
    played.again()
    before = played.collector.state_dict()

    played.collector.collect(played.agent, played.buffer)

    after = played.collector.state_dict()
    assert not played.collector.is_between_rollouts
    assert torch.equal(before["generator"], after["generator"])
    assert (before["n_steps"], after["n_steps"]) == (3, 3)
    assert after["position"] is None  # they stand amid a rollout that does not count


def test_envs_that_were_not_saved_cannot_be_gone_on_with() -> None:
    played = Played(Places(2), n_steps=3)

    with pytest.raises(ValueError, match="was not saved"):
        played.collector.resume_at(None, [], played.agent)


def test_before_the_first_rollout_there_is_nothing_to_see_and_nowhere_to_stand() -> None:
    played = Played(Places(2), n_steps=3)

    assert played.collector.state_dict()["position"] is None
    with pytest.raises(RuntimeError, match="nothing was collected"):
        played.collector.last_inputs(played.agent)


def test_each_shuffle_has_every_row_once_in_an_order_that_the_generator_decides() -> None:
    buffer = Played(Places(3), n_steps=4).buffer
    orders = []
    for seed in (1, 1, 2):
        buffer.shuffle(torch.Generator().manual_seed(seed), n_orders=2)
        orders.append([buffer.order(number).tolist() for number in (0, 1)])

    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    for pair in orders:
        assert [sorted(order) for order in pair] == [list(range(12))] * 2


def test_people_are_shown_actions_and_advantages() -> None:
    played = Played(Places(2), n_steps=3)
    played.again()
    played.finish(gamma=0.9, lam=0.9)

    shown = played.buffer.shown()

    assert {name: each.shape for name, each in shown.items()} == {
        "rollout/actions": (3, 2),
        "rollout/advantages": (3, 2),
    }


def test_the_tensors_of_a_buffer_stay_where_they_are() -> None:
    played = Played(Drift(2), n_steps=3, scale_reward=True)

    def places(buffer: TensorBuffer) -> list[int]:
        fields = (buffer.obs, buffer.action, buffer.reward, buffer.facts(), *buffer.learned[1:])
        return [each.data_ptr() for each in (*fields, *played.collector.env.position.state)]

    played.again()
    played.finish(gamma=0.9, lam=0.9)
    before = places(played.buffer)
    played.again()
    played.finish(gamma=0.9, lam=0.9)

    assert places(played.buffer) == before
