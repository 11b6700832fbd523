"""CompiledPPO: ``TorchPPO`` with its arithmetic fused by torch.compile, for any network and loss.

It repeats nothing: it compiles the methods of ``TorchPPO``. So it runs what they say, also after an
edit. What cannot be compiled runs as written, and the user sees why once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.contracts import PlainPPO
from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates, UpdateResult
from ml_pipeline.errors import type_and_line
from ml_pipeline.policy import dense_chains
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.training.graphs import Programs, Rewrite, is_of_compiler


class CompiledPPO:
    """Acts, scores and learns in rollouts of one size, which stay on the device."""

    acts_faster_on_cpu = takes_arrays = False

    def __init__(self, plain: PlainPPO, programs: Programs) -> None:
        self.config = plain.config
        self._plain = plain
        self._tell = programs.tell
        forward, learning = _rewrites(plain, programs.tell)
        self.sample = programs.compiled(plain.sample, "acting", forward)
        self.score = programs.compiled(plain.score, "scoring", forward)
        self.value = programs.compiled(plain.value, "the critic", forward)
        self.take: Callable[[Minibatch, Tensor], Minibatch] = programs.compiled(
            Minibatch.take, "the choice of a minibatch"
        )
        self._evaluated = programs.compiled(plain.evaluated, "the loss", learning)
        self._has_updated = False
        if isinstance(plain.adam, FlatAdam):
            plain.adam.compile(lambda step: programs.compiled(step, "Adam"))

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        """As written: it is called for evaluation, with any number of envs."""
        return self._plain.outputs(inputs)

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
        try:
            result = self._plain.update(batch, rates, self._evaluated)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # torch compiles the gradient when it is first needed, after the loss.
            if self._has_updated or not is_of_compiler(error):
                raise
            self._tell(f"the gradient is not compiled and runs slower: {type_and_line(error)}")
            self._evaluated = self._plain.evaluated
            result = self._plain.update(batch, rates)
        self._has_updated = True
        return result

    def refresh(self) -> None:
        """Nothing is cached here."""


def _rewrites(
    plain: PlainPPO, tell: Callable[[str], None]
) -> tuple[Rewrite | None, Rewrite | None]:
    """What puts dense layers into fused kernels, without and with gradients."""
    precision = plain.precision
    if not dense_chains.can_fuse(plain.adam.values.device, precision):
        return None, None
    fused = partial(dense_chains.fused, kind=dense_chains.KINDS[precision], tell=tell)
    return partial(fused, keeps=False), partial(fused, keeps=True)


def compiled_or_none(plain: PlainPPO, programs: Programs) -> CompiledPPO | None:
    """None if ``programs`` compiles nothing."""
    return CompiledPPO(plain, programs) if programs.compiles else None
