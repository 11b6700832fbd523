"""Optimisers: clip the gradients and take a step, unless something is not finite.

``FlatAdam`` is Adam on one flat tensor of all parameters, so that a step is a few kernels. It
equals ``torch.optim.Adam``. ``TorchOptimiser`` runs any optimiser of torch, or one like them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ml_pipeline.errors import UserError, type_and_line
from ml_pipeline.mirrors import Mirrored, why_not
from ml_pipeline.ranks.world import ALONE
from ml_pipeline.records import StateDict
from ml_pipeline.targets import check_arguments, import_entry

BETA_1, BETA_2 = 0.9, 0.999
_NEEDED = ("param_groups", "step", "state_dict", "load_state_dict")

# What ``FlatAdam.step_on_cpu`` repeats.
MIRRORED: Mirrored = {
    "ml_pipeline.policy.optimiser.BETA_1": "8139b3395240",
    "ml_pipeline.policy.optimiser.BETA_2": "11958c6d1f10",
    "ml_pipeline.policy.optimiser.adam_step": "f45e85c224c0",
    "ml_pipeline.policy.optimiser.FlatAdam.step": "db8cc9695613",
}


def flat_parameters(module: nn.Module) -> Tensor:
    """All parameters as one tensor; the module's own become views of it."""
    parameters = list(module.parameters())
    values = torch.cat([each.detach().flatten() for each in parameters])
    end = 0
    for parameter in parameters:
        start, end = end, end + parameter.numel()
        parameter.data = values[start:end].view_as(parameter)
    return values


def adam_step(
    state: list[Tensor],
    grad: Tensor,
    learning_rate: Any,
    loss: Tensor,
    *,
    eps: float,
    max_grad_norm: float,
) -> tuple[Tensor, Tensor]:
    """``FlatAdam.step`` on its ``tensors``, for a function that is compiled."""
    values, mean, square, n_steps = state
    norm = torch.linalg.vector_norm(grad)
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    taken = finite.float()
    scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    grad = torch.where(finite, grad * scale, 0.0)
    n_steps += taken
    mean.lerp_(grad, (1.0 - BETA_1) * taken)
    square.lerp_(grad.square(), (1.0 - BETA_2) * taken)
    size = learning_rate / (1.0 - BETA_1**n_steps)
    deviation = (square / (1.0 - BETA_2**n_steps)).sqrt_().add_(eps)
    values.sub_(torch.where(finite, size * mean / deviation, 0.0))
    return norm, finite


class FlatParameters:
    """All parameters and gradients of a module as two flat tensors; the module's are views."""

    def __init__(self, module: nn.Module, *, max_grad_norm: float) -> None:
        """Move the module to its device first."""
        self.max_grad_norm = max_grad_norm
        self.world = ALONE
        self.share = 1.0  # of this rank in the next minibatch
        self.names = [name for name, each in module.named_parameters() if each.requires_grad]
        self.parameters = parameters = [each for each in module.parameters() if each.requires_grad]
        others = {str(each.dtype) for each in parameters} - {"torch.float32"}
        if others:
            raise UserError(
                f"network parameters must be float32, got {', '.join(others)}; call .float()"
            )
        self.values = torch.cat([each.detach().flatten() for each in parameters])
        self._grad_and_loss = self.values.new_zeros(len(self.values) + 1)  # summed over ranks
        self.grad = self._grad_and_loss[:-1]
        self.n_steps = torch.zeros((), device=self.values.device)
        self.views: dict[str, tuple[Tensor, Tensor]] = {}  # by name: (values, gradient)
        end = 0
        for name, parameter in zip(self.names, parameters, strict=True):
            start, end = end, end + parameter.numel()
            parameter.data = self.values[start:end].view_as(parameter)
            parameter.grad = self.grad[start:end].view_as(parameter)
            self.views[name] = (parameter.data, parameter.grad)

    def place(self, name: str) -> int:
        """Offset of a parameter in ``values``."""
        return int(self.views[name][0].storage_offset())

    def differentiate(self, loss: Tensor) -> None:
        """Write the gradients of ``loss`` to ``grad``."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        own = [gradient for _, gradient in self.views.values()]
        pairs = zip(own, found, strict=True)
        # All in one kernel.
        torch._foreach_copy_(own, [torch.zeros_like(a) if b is None else b for a, b in pairs])

    def broken_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are not finite."""
        return [name for name, (_, grad) in self.views.items() if not torch.isfinite(grad).all()]


class FlatAdam(FlatParameters):
    """Adam with gradient clipping."""

    def __init__(self, module: nn.Module, *, eps: float, max_grad_norm: float) -> None:
        super().__init__(module, max_grad_norm=max_grad_norm)
        self.eps = eps
        self._mean, self._square = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self._adam_step: Callable[..., tuple[Tensor, Tensor]] = self._step
        self._has_fused: bool | None = None  # whether ``quick_step`` may use ``step_on_cpu``
        if self.values.device.type == "cpu":
            self._grad_and_loss_array = self._grad_and_loss.numpy()
            self._grad_array, self._n_steps_array = self.grad.numpy(), self.n_steps.numpy()
            held = ([each] for each in (self.values, self.grad, self._mean, self._square))
            self._fused: tuple[Any, ...] = (*held, [], [self.n_steps])

    def step(self, learning_rate: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip the gradients and take one step; returns their norm, and whether all was finite.

        Nothing changes if the loss or a gradient is not finite. Does not synchronise with the
        device.
        """
        loss = self.world.average(self._grad_and_loss, loss, self.share)
        return self._adam_step(self.tensors, self.grad, learning_rate, loss)

    def _step(
        self, state: list[Tensor], grad: Tensor, learning_rate: Any, loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        limits = {"eps": self.eps, "max_grad_norm": self.max_grad_norm}
        return adam_step(state, grad, learning_rate, loss, **limits)

    def compile(self, compiled: Callable[[Any], Any]) -> None:
        """Replace the arithmetic of ``step`` by ``compiled`` of it."""
        self._adam_step = compiled(self._step)

    def step_on_cpu(self, learning_rate: float, loss: float) -> tuple[float, bool]:
        """``step`` by the kernel of ``torch.optim.Adam(fused=True)``; waits for the result."""
        loss = self.world.average_array(self._grad_and_loss_array, loss, self.share)
        grad = self._grad_array
        norm = math.sqrt(float(grad.dot(grad)))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return norm, False
        if norm > self.max_grad_norm:
            grad *= self.max_grad_norm / (norm + 1e-6)
        self._n_steps_array += 1.0
        # The moments of a unit without gradients shrink until they are denormal numbers, which
        # take many times as long. As zeros they change no weight. This holds for one thread only;
        # a run on a CPU has one.
        torch.set_flush_denormal(True)
        torch._fused_adam_(
            *self._fused,
            lr=learning_rate,
            beta1=BETA_1,
            beta2=BETA_2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        torch.set_flush_denormal(False)
        return norm, True

    def quick_step(self, learning_rate: float, loss: Any) -> tuple[Any, Any]:
        """``step_on_cpu`` on a CPU, which returns plain numbers, else ``step``."""
        if self._has_fused is None:
            is_cpu = self.values.device.type == "cpu"
            self._has_fused = is_cpu and why_not(MIRRORED, self) is None
        if self._has_fused:
            return self.step_on_cpu(learning_rate, float(loss))
        return self.step(learning_rate, torch.as_tensor(loss))

    @property
    def tensors(self) -> list[Tensor]:
        """The state of ``adam_step``."""
        return [self.values, self._mean, self._square, self.n_steps]

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Running means of the gradient and of its square."""
        return self._mean, self._square

    def state_dict(self) -> StateDict:
        return {"mean": self._mean, "square": self._square, "n_steps": self.n_steps}

    def load_state_dict(self, state: StateDict) -> None:
        for name, own in self.state_dict().items():
            if own.shape != state[name].shape:
                raise ValueError(
                    f"optimiser state has {state[name].numel()} values, the network {own.numel()}"
                )
            own.copy_(state[name])


class TorchOptimiser(FlatParameters):
    """An optimiser that a config names, with the same clipping and schedule as ``FlatAdam``.

    It is called with ``[(name, parameter), ...]`` and ``lr``, as every optimiser of torch may be. A
    function may make groups of them; their learning rates keep their ratios.
    """

    def __init__(
        self,
        module: nn.Module,
        entry: Mapping[str, Any],
        *,
        learning_rate: float,
        max_grad_norm: float,
        key: str,
    ) -> None:
        super().__init__(module, max_grad_norm=max_grad_norm)
        make, options = import_entry(entry, key=key)
        check_arguments(make, {"lr": learning_rate, **options}, key=key, given=1)
        named = list(zip(self.names, self.parameters, strict=True))
        try:
            self._made = make(named, **{"lr": learning_rate, **options})
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{key}._target_={entry['_target_']}: {type_and_line(error)}"
            ) from error
        missing = [each for each in _NEEDED if not hasattr(self._made, each)]
        if missing:
            raise UserError(
                f"{key}._target_={entry['_target_']}: made a {type(self._made).__name__} without "
                f"{', '.join(missing)}; name a torch.optim.Optimizer, or what behaves like one"
            )
        closure = inspect.signature(self._made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UserError(
                f"{key}._target_={entry['_target_']}: its step needs a closure, to compute the "
                "loss again; name one that takes a step from the gradients alone"
            )
        self._factors = [group["lr"] / learning_rate for group in self._made.param_groups]

    def step(self, learning_rate: Any, loss: Tensor) -> tuple[Tensor, Tensor]:
        """As ``FlatAdam.step``, but it waits for the device."""
        loss = self.world.average(self._grad_and_loss, loss, self.share)
        norm = torch.linalg.vector_norm(self.grad)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if finite:
            self.grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            for group, factor in zip(self._made.param_groups, self._factors, strict=True):
                group["lr"] = float(learning_rate) * factor
            self._made.step()
            self.n_steps += 1.0
        return norm, finite

    def step_on_cpu(self, learning_rate: float, loss: float) -> tuple[float, bool]:
        norm, finite = self.step(learning_rate, torch.tensor(loss))
        return float(norm), bool(finite)

    def state_dict(self) -> StateDict:
        return {"n_steps": self.n_steps, "made": self._made.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        if "made" not in state:
            raise ValueError("the checkpoint has the state of Adam, not of this optimiser")
        self.n_steps.copy_(state["n_steps"])
        self._made.load_state_dict(state["made"])


Optimiser = FlatAdam | TorchOptimiser
