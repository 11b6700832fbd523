"""SumTree: draws indices in proportion to their priorities, in logarithmic time."""

from __future__ import annotations

import torch
from torch import Tensor


class SumTree:
    """Priorities of ``n_leaves`` items; an item of priority 0 is never drawn.

    Each node is the sum of its two children and is computed from them only. So the tree depends
    on the priorities alone, not on the order of the changes.
    """

    def __init__(self, n_leaves: int, device: torch.device) -> None:
        self.n_leaves = n_leaves
        self._n_levels = max(n_leaves - 1, 1).bit_length()
        # MPS has no float64. Node i has the children 2i and 2i + 1; the root is node 1.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._nodes = torch.zeros(2 * 2**self._n_levels, dtype=dtype, device=device)
        self._first_leaf = 2**self._n_levels

    @property
    def total(self) -> Tensor:
        return self._nodes[1]

    @property
    def priorities(self) -> Tensor:
        return self._nodes[self._first_leaf : self._first_leaf + self.n_leaves]

    @property
    def n_bytes(self) -> int:
        return self._nodes.nbytes

    def set(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of the items at ``index``; equal indices need equal priorities."""
        nodes, node = self._nodes, index + self._first_leaf
        nodes[node] = priority.to(nodes.dtype)
        for _ in range(self._n_levels):
            node = node >> 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def load(self, priorities: Tensor) -> None:
        """Replace all priorities."""
        self.priorities.copy_(priorities)
        start = self._first_leaf
        while start > 1:
            start //= 2
            children = self._nodes[2 * start : 4 * start].view(-1, 2)
            self._nodes[start : 2 * start] = children[:, 0] + children[:, 1]

    def draw(self, uniform: Tensor) -> Tensor:
        """Indices for uniform numbers [B] in [0, 1): one from each of B equal parts of the sum."""
        n = len(uniform)
        parts = torch.arange(n, device=uniform.device, dtype=self._nodes.dtype)
        value = (parts + uniform) / n * self.total
        node: Tensor = torch.ones(n, dtype=torch.int64, device=uniform.device)
        for _ in range(self._n_levels):
            left, right = self._nodes[2 * node], self._nodes[2 * node + 1]
            # Rounding may leave a value beyond the sum: never enter an empty half.
            goes_right = (value >= left) & (right > 0)
            value = torch.where(goes_right, value - left, value)
            node = 2 * node + goes_right.long()
        index: Tensor = node - self._first_leaf
        return index
