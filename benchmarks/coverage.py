"""How often the intervals and claims of ``compare`` hold, by simulated runs whose truth is known.

    python benchmarks/coverage.py

Draws the final returns of seeds from three shapes: normal, uniform, and exponential (a few seeds
far above the others). Coverage: the share of "95 %" intervals of the IQM that hold the IQM of the
shape; over several envs, of the mean of their IQMs. The envs have equal spreads, or env k has 1/k
of the first one's. False claims: the share of comparisons of equal groups in which a difference is
claimed.

The result is in benchmarks/results/coverage.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np

from ml_pipeline.analysis.statistics import (
    Array,
    iqm,
    iqm_over_envs,
    iqm_with_interval,
    verdicts,
)

RESULTS = Path(__file__).parent / "results" / "coverage.json"
N_TIMES, N_CLAIMS = 20_000, 1_000
N_ENVS = (2, 3, 5, 10)
SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda generator, size: generator.normal(size=size),
    "uniform": lambda generator, size: generator.uniform(size=size),
    "exponential": lambda generator, size: generator.exponential(size=size),
}


@cache
def true_iqm(shape: str) -> float:
    """The IQM of very many seeds."""
    return float(iqm(SHAPES[shape](np.random.default_rng(0), (10_000_000, 1)))[0])


def coverage(shape: str, n_seeds: int) -> float:
    generator = np.random.default_rng([1, n_seeds])
    truth = true_iqm(shape)
    _, low, high = iqm_with_interval(SHAPES[shape](generator, (n_seeds, N_TIMES)))
    return float(((low <= truth) & (truth <= high)).mean())


def joint_coverage(shape: str, n_seeds: int, spreads: Sequence[float]) -> float:
    """Of the mean of the IQMs of several envs."""
    generator = np.random.default_rng([4, n_seeds, len(spreads)])
    parts = [spread * SHAPES[shape](generator, (n_seeds, N_TIMES)) for spread in spreads]
    truth = true_iqm(shape) * sum(spreads) / len(spreads)
    _, low, high = iqm_over_envs(parts)
    return float(((low <= truth) & (truth <= high)).mean())


def bootstrap_coverage(shape: str, n_seeds: int) -> float:
    """The percentile bootstrap of the IQM, for comparison."""
    generator = np.random.default_rng([2, n_seeds])
    truth = true_iqm(shape)
    rows = generator.integers(0, n_seeds, (n_seeds, 1_000))
    held = 0
    for runs in SHAPES[shape](generator, (N_TIMES // 10, n_seeds)):
        low, high = np.quantile(iqm(runs[rows]), [0.025, 0.975])
        held += bool(low <= truth <= high)
    return held / (N_TIMES // 10)


def false_claims(shape: str, n_groups: int, n_seeds: int) -> float:
    """The best group first, as in ``compare``."""
    generator = np.random.default_rng([3, n_groups, n_seeds])
    found = 0
    for _ in range(N_CLAIMS):
        runs = SHAPES[shape](generator, (n_groups, n_seeds))
        ranked = sorted(runs, key=lambda each: -float(iqm(each)))
        lines = verdicts({str(rank): [each] for rank, each in enumerate(ranked)})
        found += any("no difference" not in line for line in lines)
    return found / N_CLAIMS


def main() -> None:
    rows = [
        {
            "shape": shape,
            "seeds": n_seeds,
            "coverage": coverage(shape, n_seeds),
            **{
                f"coverage over {n_envs} envs of {kind} spread": joint_coverage(
                    shape,
                    n_seeds,
                    [1.0 if kind == "equal" else 1.0 / k for k in range(1, n_envs + 1)],
                )
                for n_envs in N_ENVS
                for kind in ("equal", "unequal")
            },
            "coverage of the bootstrap": bootstrap_coverage(shape, n_seeds),
            **{
                f"false claims, {n_groups} groups": false_claims(shape, n_groups, n_seeds)
                for n_groups in (2, 5)
                if n_seeds >= 5
            },
        }
        for shape in SHAPES
        for n_seeds in (2, 3, 5, 10)
    ]
    for row in rows:
        print(row)
    found = {"command": "python benchmarks/coverage.py", "date": str(date.today()), "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
