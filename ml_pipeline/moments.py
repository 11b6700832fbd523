"""merge_moments: mean and variance of two samples together (Chan et al., 1979)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Moment = TypeVar("Moment", float, "Tensor")


def merge_moments(
    mean: Moment,
    variance: Moment,
    count: Any,
    batch_mean: Moment,
    batch_variance: Moment,
    batch_count: int,
) -> tuple[Moment, Moment, Any]:
    """Mean, variance and count of all samples; variances are without Bessel's correction.

    ``count`` has the kind of the moments: a number, or a tensor that stays on its device.
    """
    total = count + batch_count
    share = batch_count / total
    shift = batch_mean - mean
    between = shift * shift * share * (1.0 - share)
    merged_variance = variance * (1.0 - share) + batch_variance * share + between
    return mean + shift * share, merged_variance, total
