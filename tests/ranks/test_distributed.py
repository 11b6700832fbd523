"""Several ranks train as one process with all of their envs would."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from rank_runs import CASES, of_two_ranks, trained

from ml_pipeline.assembly.compose import ConfigError, checked_config, compose_config
from ml_pipeline.assembly.plan import check_ranks, make_plan
from ml_pipeline.errors import UserError
from ml_pipeline.ranks.minibatches import SharedMinibatches
from ml_pipeline.ranks.world import World, launched_rank
from ml_pipeline.training.loop import state_of_rank

pytestmark = pytest.mark.xdist_group("ranks")  # tests share the runs of two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return of_two_ranks(tmp_path_factory.mktemp("ranks"), *CASES)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Trains a case once in one process with all envs."""
    folder = tmp_path_factory.mktemp("one_process")
    return cache(lambda case: trained(folder, case, n_envs=8))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_four_envs_equal_one_process_with_eight(
    case: str,
    two_ranks: dict[str, list[dict[str, Any]]],
    one_process: Callable[[str], dict[str, Any]],
) -> None:
    alone = one_process(case)

    for rank in two_ranks[case]:
        assert rank["env_steps"] == alone["env_steps"] == 3 * 16 * 8
        for name, weight in alone["model"].items():
            torch.testing.assert_close(rank["model"][name], weight, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_equal_weights_after_every_gradient_step(
    case: str, two_ranks: dict[str, list[dict[str, Any]]]
) -> None:
    first, second = (rank["checksums"] for rank in two_ranks[case])

    assert len(first) == (6 if case == "kl_stop" else 12)  # that stops after one epoch
    assert len(set(first)) == len(first)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_metrics_cover_the_envs_of_all_ranks(
    case: str,
    two_ranks: dict[str, list[dict[str, Any]]],
    one_process: Callable[[str], dict[str, Any]],
) -> None:
    alone = one_process(case)

    leader, follower = two_ranks[case]
    assert follower["rows"] == []  # callbacks run on rank 0
    assert leader["rows"] == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in alone["rows"]]


@pytest.mark.slow
def test_moments_count_the_frames_of_all_ranks(
    two_ranks: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in two_ranks["normalised"]:
        assert rank["model"]["model preprocess.moments.0.count"] == 3 * 16 * 8


def test_one_rank_returns_its_input() -> None:
    world, grad, mean = World(), torch.ones(2), torch.tensor(3.0)

    assert world.sum(grad) is grad
    assert world.average(grad, 0.5, 1.0) == 0.5
    assert grad.tolist() == [1.0, 1.0]
    assert world.moments(mean, mean, 4) == (mean, mean, 4)
    assert world.max([2, 5]) == [2, 5]
    assert world.agreed("mine") == "mine"
    assert world.gathered("mine") == ["mine"]
    assert world.envs(4) == slice(0, 4)
    assert world.all_envs(4) == 4
    order = torch.arange(6)
    assert world.minibatches(3, 2, 2) is None  # it has all of each
    assert world.batches(2).part(order) == (None, order)
    assert world.batches(2).errors(grad, None) is grad
    world.refuse("one rank refuses nothing")


def test_world_words_for_the_user_count_the_ranks() -> None:
    cpu = torch.device("cpu")

    assert [World().where(cpu), World(0, 2).where(cpu)] == ["cpu", "2 ranks, cpu"]
    assert World().why_no_graphs() == World().misfit(1) == ""
    assert World(1, 3).why_no_graphs() == "3 ranks use no graphs; none has an all-reduce"
    assert World(1, 3).misfit(1) == "1 rank saved them, this run has 3"
    assert World().misfit(2) == "2 ranks saved them, this run has 1"
    with pytest.raises(UserError, match="2 ranks: too few"):
        World(0, 2).refuse(f"{World(0, 2).name}: too few")


def test_parts_of_all_ranks_form_the_minibatches_of_one_process() -> None:
    expected = torch.randperm(5 * 8, generator=torch.Generator().manual_seed(7)).view(2, -1)

    found: list[list[int]] = [[], []]
    for rank in (0, 1):
        parts, shares = World(rank, 2).minibatches(5, 4, 2).of(expected.flatten())
        assert shares == [len(part) / 20 for part in parts]
        for minibatch, part in zip(found, parts, strict=True):
            minibatch += [each // 4 * 8 + 4 * rank + each % 4 for each in part.tolist()]

    assert [sorted(each) for each in found] == [sorted(each) for each in expected.tolist()]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["agent.algorithm=own_parts.ONE_PROCESS"], "agent.algorithm=own_parts.ONE_PROCESS"),
        (["env=hockey", "opponent=self_play"], "opponent"),
        (["env=hockey", "curriculum=hockey"], "curriculum"),
    ],
)
def test_settings_that_need_one_process_are_refused(overrides: list[str], key: str) -> None:
    config = checked_config(compose_config(overrides))
    plan = make_plan(checked_config(compose_config(["device=cpu", "logger=[]"])))
    place = plan.context

    check_ranks(config, place, plan.agent)  # one process accepts it
    with pytest.raises(ConfigError, match=rf"{key}: does not train on 2 ranks"):
        check_ranks(config, place._replace(world=World(0, 2)), plan.agent)


def test_each_rank_resumes_from_its_own_state() -> None:
    saved = {"env_steps": 8, "collector": "first", "ranks": [{"collector": each} for each in "ab"]}

    of_second, parts = state_of_rank(saved, World(1, 2))
    assert of_second == {"env_steps": 8, "collector": "b", "n_ranks": 2}
    assert parts == saved["ranks"]
    assert state_of_rank(saved, World())[0] == {"env_steps": 8, "collector": "a", "n_ranks": 2}
    assert state_of_rank({"env_steps": 8}, World(1, 2))[0] == {"env_steps": 8, "n_ranks": 1}


def test_process_is_a_rank_only_with_all_variables_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_rank() == 0

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launched_rank() == 3


def test_table_of_all_reduces_in_the_docs_follows_the_model_of_the_benchmark() -> None:
    link = runpy.run_path(str(REPOSITORY / "benchmarks" / "scale.py"))["parse_link"]("10:50")
    page = (REPOSITORY / "docs" / "scale.md").read_text()

    rows = {2: "0.13 ms | 32 ms", 8: "0.75 ms | 57 ms", 64: "6.4 ms | 69 ms"}
    for n_ranks, shown in rows.items():
        seconds = [link.all_reduce_seconds(n_ranks, 4 * (n + 1)) for n in (9_155, 10_000_000)]
        assert " | ".join(f"{1e3 * each:.2g} ms" for each in seconds) == shown
        assert f"| {n_ranks} | {shown} |" in page


def test_the_advantage_of_a_minibatch_of_one_transition_is_left_as_it_is() -> None:
    advantage, order = torch.tensor([3.0, -2.0, 5.0, 7.0]), torch.tensor([2, 0, 3, 1])
    found = []
    for n_minibatches in (4, 2):
        minibatches = SharedMinibatches(2, 2, slice(0, 2), n_minibatches, lambda sums: None)
        found.append(minibatches.normalised(advantage, *minibatches.of(order)).tolist())

    assert found == [[3.0, -2.0, 5.0, 7.0], pytest.approx([-1.0, -1.0, 1.0, 1.0])]
