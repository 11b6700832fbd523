"""Random numbers as a pure function of a key and a counter, equal on every device.

There is no generator state: the caller passes the key and the counter. Only integer operations of
torch are used. Nothing waits for the host, and a CUDA graph can capture every draw. CPU, CUDA and
MPS give the same bits, except that ``randn`` depends on the last bits of ``erfinv``.

The algorithm is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
Its 32-bit words are stored in int64 tensors, as 0 .. 2^32 - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 2**32 - 1
# Minus 2^32, so that no product overflows int64, which is undefined behaviour in C++. The lower
# half of a product stays the same; ``philox`` adds the missing factor to the upper half.
_MULTIPLIER_0 = 0xD2511F53 - 2**32
_MULTIPLIER_1 = 0xCD9E8D57 - 2**32
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_N_PHILOX_ROUNDS = 10
# The last word of the counter, so that different kinds of draws never share a block.
_ROWS, _UNIFORM, _NORMAL, _SHUFFLE = 1, 2, 3, 4
# Measured over 24,000 keys. With 24 rounds, all orders of up to six elements are equally frequent.
# With 256 or more elements, pairs show no correlation after 6 rounds.
_N_ROUNDS_FEW, _N_ROUNDS_MANY = 24, 10


def draw_keys(n: int, generator: torch.Generator) -> Tensor:
    """``n`` keys for the functions below, int64 [n], from a generator that the caller owns."""
    return torch.randint(2**62, (n,), generator=generator)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words per counter and key; all six tensors broadcast against each other."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_N_PHILOX_ROUNDS):
        product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
        upper_0, upper_1 = (product_0 >> 32) + word_0, (product_1 >> 32) + word_2
        word_0, word_1 = upper_1 ^ word_1 ^ key_0, product_1 & _MASK
        word_2, word_3 = upper_0 ^ word_3 ^ key_1, product_0 & _MASK
        key_0, key_1 = (key_0 + _KEY_STEP_0) & _MASK, (key_1 + _KEY_STEP_1) & _MASK
    return word_0, word_1, word_2, word_3


def uniform(seed: Tensor, counter: Tensor, n: int) -> tuple[Tensor, ...]:
    """[N] int64 seeds and counters -> ``n`` tensors [N], float32 in [0, 1).

    Element i depends only on seed[i] and counter[i], not on N. A smaller ``n`` returns the first
    tensors of a larger one. Separate tensors let a compiler fuse each with its use.
    """
    words: list[Tensor] = []
    low, high = _halves(counter)
    for number in range(-(-n // 4)):
        block, domain = _constant(number, seed.device), _constant(_ROWS, seed.device)
        words += philox((low, high, block, domain), _halves(seed))
    return tuple(_unit(word) for word in words[:n])


def rand(key: Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Float32 in [0, 1), 24 bits of it random; element i is a function of (key, i).

    ``key`` is a 0-d int64 tensor. It may be on the CPU while the result is on ``device``.
    """
    return _unit(_words(key, shape, _UNIFORM, device))


def randn(key: Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Standard normal float32, from -5.4 to 5.4; element i is a function of (key, i)."""
    # Odd numbers over 2^24 are exact in float32, symmetric, and never -1 or 1 (erfinv: infinite).
    odd = (_words(key, shape, _NORMAL, device) >> 8) * 2 + (1 - 2**24)
    return torch.erfinv(odd.to(torch.float32) * 2**-24) * math.sqrt(2.0)


def permutation(n: int, key: Tensor) -> Tensor:
    """0 .. n - 1 in an order drawn by ``key`` (a 0-d int64 tensor): int64 [n], on its device.

    A Feistel network permutes 0 .. 2^k - 1 for the next power of two, each element independently.
    The values below n, in their order, are the permutation (Mitchell et al. 2022,
    "Bandwidth-optimal random shuffling for GPUs"). This needs no sort, no loop over elements and
    no shape that depends on data. A 64-bit key cannot reach all orders of many elements.
    """
    if n < 1:
        raise ValueError(f"a permutation needs at least one element, got n={n}")
    n_bits = (n - 1).bit_length()
    values = _bijection(n_bits, key)
    if n == 2**n_bits:
        return values
    kept = values < n
    # Dropped values go to one slot after the end, so the scatter has a fixed size.
    slot = (torch.cumsum(kept, 0) - 1).masked_fill(~kept, n)
    return torch.zeros(n + 1, dtype=torch.int64, device=key.device).scatter(0, slot, values)[:n]


def _bijection(n_bits: int, key: Tensor) -> Tensor:
    """0 .. 2^n_bits - 1 in an order drawn by ``key``: each half of the bits changes the other."""
    n_rounds = _N_ROUNDS_FEW if n_bits <= 6 else _N_ROUNDS_MANY
    block = _count(-(-n_rounds // 4), key.device)
    zero = torch.zeros_like(block)
    words = philox((block, zero, zero, zero + _SHUFFLE), _halves(key))
    round_key = torch.stack(words, dim=-1).flatten()
    n_low = (n_bits + 1) // 2
    number = _count(2**n_bits, key.device)
    low_mask, high_mask = (1 << n_low) - 1, (1 << (n_bits - n_low)) - 1
    low, high = number & low_mask, number >> n_low
    for i in range(0, n_rounds, 2):
        low = low ^ (_mix(high ^ round_key[i]) & low_mask)
        high = high ^ (_mix(low ^ round_key[i + 1]) & high_mask)
    return (high << n_low) | low


def _mix(word: Tensor) -> Tensor:
    """Wellons' lowbias32: flipping one input bit flips each output bit half of the time."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * (0x846CA68B - 2**32)) & _MASK
    return word ^ (word >> 16)


def _words(
    key: Tensor, shape: Sequence[int], domain: int, device: torch.device | str | None
) -> Tensor:
    """One random word per element of ``shape``; uses all four words of each block."""
    n = math.prod(shape)
    block = _count(-(-n // 4), device or key.device)
    zero = torch.zeros_like(block)
    words = philox((block, zero, zero, zero + domain), _halves(key))
    return torch.stack(words, dim=-1).flatten()[:n].reshape(tuple(shape))


def _count(n: int, device: torch.device | str) -> Tensor:
    # The mask changes no value. Without it Inductor (torch 2.13) treats the count and the later
    # products as one index and computes both in 32 bits.
    return torch.arange(n, device=device) & _MASK


def _halves(number: Tensor) -> tuple[Tensor, Tensor]:
    return number & _MASK, (number >> 32) & _MASK


def _constant(value: int, device: torch.device) -> Tensor:
    # Filled on the device; torch.tensor(value) would copy from the host and wait.
    return torch.full((), value, dtype=torch.int64, device=device)


def _unit(word: Tensor) -> Tensor:
    return (word >> 8).to(torch.float32) * 2**-24
