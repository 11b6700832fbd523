"""Two ranks on a GPU train as one process with all of their envs would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import of_two_ranks, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
    pytest.mark.timeout(600),  # both ranks compile
    pytest.mark.xdist_group("gpu ranks"),  # tests share the runs of two ranks
]

CASES = ["discrete", "normalised", "recurrent", "tensor", "sac", "dqn, prioritised", "sac, tensor"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return of_two_ranks(tmp_path_factory.mktemp("ranks"), *CASES, device="cuda")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_four_envs_equal_one_process_with_eight_on_a_gpu(
    case: str, two_ranks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    alone = trained(tmp_path, case, n_envs=8, device="cuda")

    for rank in two_ranks[case]:
        assert rank["env_steps"] == alone["env_steps"]
        for name, weight in alone["model"].items():
            torch.testing.assert_close(rank["model"][name], weight, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_on_a_gpu_have_equal_weights_after_every_gradient_step(
    case: str, two_ranks: dict[str, list[dict[str, Any]]]
) -> None:
    first, second = (rank["checksums"] for rank in two_ranks[case])

    assert len(set(first)) > 1
    assert first == second
