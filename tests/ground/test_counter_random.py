"""Random numbers by key and counter: published values, distributions and permutations."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.counter_random import permutation, philox, rand, randn


def uniform(seed: Tensor, counter: Tensor, n: int) -> Tensor:
    """[N, n]"""
    return torch.stack(counter_random.uniform(seed, counter, n), dim=1)


def key(number: int) -> Tensor:
    return torch.tensor(number)


@pytest.mark.parametrize(
    ("given", "answer"),  # counter and key
    [
        ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_returns_the_published_values_of_random123(given: str, answer: str) -> None:
    a, b, c, d, low, high = (torch.tensor(int(word, 16)) for word in given.split())

    words = philox((a, b, c, d), (low, high))

    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_a_row_depends_only_on_its_own_seed_and_counter() -> None:
    seed, counter = torch.tensor([3, 2**40, 5, 3]), torch.tensor([0, 1, 2**33, 1])

    together = uniform(seed, counter, 7)

    alone = [uniform(seed[i : i + 1], counter[i : i + 1], 7) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[:, :3], uniform(seed, counter, 3))
    assert len(set(together.flatten().tolist())) == 28


def test_all_64_bits_of_seed_and_counter_matter() -> None:
    seed = torch.tensor([1, 1 + 2**32, 1, 1, -1])
    counter = torch.tensor([1, 1, 2, 1 + 2**32, 1])

    assert len(set(uniform(seed, counter, 1).flatten().tolist())) == 5


def test_uniform_numbers_are_uniform() -> None:
    n = 100_000
    for numbers in (rand(key(1), (n,)), uniform(torch.arange(n), torch.zeros(n).long(), 1)[:, 0]):
        assert numbers.dtype == torch.float32
        assert numbers.min() >= 0
        assert numbers.max() < 1
        # Kolmogorov-Smirnov: the largest gap exceeds 1.95 / sqrt(n) once in a thousand times.
        ranks = torch.arange(1, n + 1) / n
        assert (numbers.sort().values - ranks).abs().max() < 1.95 / math.sqrt(n)


def test_an_element_does_not_depend_on_the_shape() -> None:
    whole = rand(key(5), (40,))

    assert torch.equal(rand(key(5), (13,)), whole[:13])
    assert torch.equal(rand(key(5), (4, 2, 5)), whole.reshape(4, 2, 5))
    assert torch.equal(randn(key(5), (3, 3)).flatten(), randn(key(5), (40,))[:9])
    assert rand(key(5), ()).shape == ()
    assert rand(key(5), (0, 3)).shape == (0, 3)


def test_neighbouring_elements_and_keys_are_uncorrelated() -> None:
    n = 100_000
    numbers, others = rand(key(1), (n,)) - 0.5, rand(key(2), (n,)) - 0.5
    for other in (numbers.roll(1), numbers.roll(4), others, randn(key(1), (n,)) / math.sqrt(12)):
        # The correlation of independent numbers has a deviation of 1 / sqrt(n).
        assert (numbers * other).mean().abs() * 12 < 4 / math.sqrt(n)


def test_normal_numbers_have_the_right_moments_and_tails() -> None:
    n = 100_000
    numbers = randn(key(3), (n,))

    assert numbers.dtype == torch.float32
    assert numbers.isfinite().all()
    assert numbers.mean().abs() < 4 / math.sqrt(n)
    assert (numbers.var() - 1).abs() < 4 * math.sqrt(2 / n)
    beyond_two = (numbers.abs() > 2).float().mean()  # 4.55 % of a normal
    assert abs(beyond_two - 0.0455) < 4 * math.sqrt(0.0455 / n)


def test_a_permutation_contains_every_element_once() -> None:
    for n in (*range(1, 71), 1000, 4096, 12345):
        order = permutation(n, key(7))
        assert order.dtype == torch.int64
        assert torch.equal(order.sort().values, torch.arange(n)), n


def test_the_key_determines_the_permutation() -> None:
    orders = {tuple(permutation(1000, key(k)).tolist()) for k in (0, 1, 2**32, -1)}

    assert len(orders) == 4
    assert torch.equal(permutation(1000, key(1)), permutation(1000, key(1)))


def test_a_permutation_of_no_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element, got n=0"):
        permutation(0, key(1))


def chi_square_excess(count: Tensor, freedom: int) -> float:
    """Deviation from the mean ``freedom``, in standard deviations sqrt(2 ``freedom``)."""
    expected = count.float().mean()
    chi_square = ((count - expected) ** 2 / expected).sum()
    return float(chi_square - freedom) / math.sqrt(2 * freedom)


def permutations(n: int, n_keys: int) -> Tensor:
    return torch.vmap(lambda one: permutation(n, one))(torch.arange(n_keys))


@pytest.mark.parametrize("n", [7, 8])
def test_every_element_is_equally_often_at_every_place(n: int) -> None:
    orders = permutations(n, 20_000)

    count = torch.nn.functional.one_hot(orders, n).sum(0)  # [place, element]
    assert chi_square_excess(count, (n - 1) ** 2) < 4


@pytest.mark.parametrize(("n", "n_orders"), [(3, 6), (4, 24), (5, 120)])
def test_all_orders_of_few_elements_are_equally_frequent(n: int, n_orders: int) -> None:
    orders = permutations(n, 24_000)

    _, count = (orders * n ** torch.arange(n)).sum(1).unique(return_counts=True)
    assert len(count) == n_orders
    assert chi_square_excess(count, n_orders - 1) < 4


def test_elements_move_by_a_third_of_the_length_on_average() -> None:
    n = 10_000
    moved = [(permutation(n, key(k)) - torch.arange(n)).abs().float().mean() / n for k in range(5)]

    # |i - j| of random i and j has mean n / 3 and deviation n / sqrt(18).
    for mean in moved:
        assert abs(mean - 1 / 3) < 4 / math.sqrt(18 * n)


@pytest.mark.slow
@pytest.mark.timeout(400)  # the compiler takes half a minute on a machine without other work
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_numbers_are_equal_bit_for_bit() -> None:
    seed = torch.arange(11)

    numbers = torch.compile(uniform, fullgraph=True, dynamic=False)(seed, seed, 20)

    assert torch.equal(numbers, uniform(seed, seed, 20))  # products of later blocks exceed 32 bits
