"""Dense chains: a compiled graph runs its multilayer perceptrons in fused kernels.

torch's compiler fuses an activation with its neighbours, but not into the matrix product before it.
So a dense layer writes and reads its output several times. ``fused`` finds chains of dense layers
in the graph of any network and replaces each by one operator, whose kernels do that once, with 16
bits. In tf32, products keep 11 bits; a float16 has as many, so precision=tf32 stores float16. The
inputs of the first layer may be large: they stay float32. Gradients are scaled by a power of two.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ml_pipeline.errors import type_and_line

_WIDEST = 1024  # units of a hidden layer
_WIDEST_TILE = 256  # a last hidden layer that is not wider also computes the outputs
_MOST_OUTPUTS = 64
_FEWEST_ROWS = 256
_ROWS_OF_A_PART = 512  # at least, of a sum over rows
_ENOUGH_MEMORY = 160 * 1024  # shared; consumer GPUs have about 100 KiB
_LINEAR = (torch._C._nn.linear, torch.nn.functional.linear)
_ACTIVATIONS: dict[Any, str] = {
    torch.tanh: "tanh",
    torch.nn.functional.tanh: "tanh",
    torch.relu: "relu",
    torch.nn.functional.relu: "relu",
    "tanh": "tanh",
    "relu": "relu",
}
_VIEWS = ("reshape", "view", "flatten")
# Of relative errors. Usual are 5e-4 and 4e-3; with relu, rounding moves units across its corner.
_LIMITS = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
KINDS = {"tf32": torch.float16, "bf16": torch.bfloat16}  # by precision; float32 is not fused


class Sizes(NamedTuple):
    """Of one or two towers with the same inputs and hidden layers."""

    layers: list[int]  # inputs, units of each hidden layer
    n_out: list[int]  # of each tower

    @property
    def places(self) -> list[int]:
        """Of each layer's weight in a tower's parameters; the last is that of the outputs."""
        places = [0]
        for n_in, n_units in pairwise(self.layers):
            places.append(places[-1] + n_units * (n_in + 1))
        return places

    @property
    def n_values(self) -> list[int]:
        """Parameters of each tower."""
        return [self.places[-1] + n * (self.layers[-1] + 1) for n in self.n_out]

    def parts_of(self, kept: Tensor, n_rows: int) -> list[Tensor]:
        """The outputs of the hidden layers, [n_towers, n_rows, n_units]."""
        n_towers = len(self.n_out)
        parts = torch.split(kept, [n_towers * n_rows * n_units for n_units in self.layers[1:]])
        return [each.view(n_towers, n_rows, -1) for each in parts]


def can_fuse(device: torch.device, precision: str) -> bool:
    """Triton comes with torch's CUDA builds; ROCm is untested."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and precision in KINDS
        and importlib.util.find_spec("triton") is not None
    )


@torch.library.custom_op(
    "ml_pipeline::dense_chains",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor params, int[] layers, int[] n_out, str activation, ScalarType kind, "
        "bool keeps) -> (Tensor, Tensor)"
    ),
)
def dense_chains(
    x: Tensor,
    params: Tensor,
    layers: list[int],
    n_out: list[int],
    activation: str,
    kind: torch.dtype,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs of all towers side by side, and what the gradient needs, if it is kept."""
    from ml_pipeline.policy.dense_kernels import forward_kernel

    sizes, n_rows, x = Sizes(layers, n_out), len(x), x.contiguous()
    out = torch.empty(n_rows, sum(n_out), device=x.device)
    kept = _new_kept(x, sizes, kind)
    weights, second, n_towers = params.to(kind), sizes.n_values[0], len(n_out)
    results = [*sizes.parts_of(kept, n_rows), out]
    seen, place = x, sizes.places
    for i, (n_in, n_units) in enumerate(pairwise([*layers, max(n_out)])):
        is_first, is_output = i == 0, i == len(layers) - 1
        gives_outputs = i == len(layers) - 2 and n_units <= _WIDEST_TILE
        tile = _tile(x.device, n_units, is_first and not gives_outputs)
        forward_kernel[(_div(n_rows, tile["B"]), _div(n_units, tile["N"]), n_towers)](
            seen, 0 if is_first else n_rows * n_in, weights, params, place[i], second, results[i],
            place[-1], out, n_rows, n_in, n_units, n_out[0], sum(n_out[1:]),
            K=min(_padded(n_in), 32 if is_first else tile["K"]), A=_padded(max(n_out)),
            ACTIVATION=activation, FIRST=is_first, LAST=gives_outputs, OUTPUTS=is_output,
            KEEP=keeps or not gives_outputs,
            **{name: tile[name] for name in ("B", "N", "num_warps", "num_stages")},
        )  # fmt: skip
        if gives_outputs:
            break
        seen = results[i]
    return out, kept if keeps else kept.new_empty(0)


@dense_chains.register_fake
def _(
    x: Tensor,
    params: Tensor,
    layers: list[int],
    n_out: list[int],
    activation: str,
    kind: torch.dtype,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], sum(n_out))
    kept = _new_kept(x, Sizes(layers, n_out), kind)
    return out, kept if keeps else kept.new_empty(0)


@torch.library.custom_op(
    "ml_pipeline::dense_chains_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x, Tensor params, Tensor kept, int[] layers, int[] n_out, "
        "str activation) -> Tensor"
    ),
)
def dense_chains_backward(
    grad: Tensor,
    x: Tensor,
    params: Tensor,
    kept: Tensor,
    layers: list[int],
    n_out: list[int],
    activation: str,
) -> Tensor:
    """Gradient of ``params``."""
    from ml_pipeline.policy.dense_kernels import back_kernel, sum_of_parts_kernel, weights_kernel

    sizes, n_rows, kind = Sizes(layers, n_out), len(x), kept.dtype
    grad, x, weights = grad.contiguous(), x.contiguous(), params.to(kind)
    n_towers, second, place = len(n_out), sizes.n_values[0], sizes.places
    outs = n_out[0], sum(n_out[1:])
    is_scaled = kind == torch.float16
    largest = torch.linalg.vector_norm(grad, math.inf) if is_scaled else grad
    seen = [x, *sizes.parts_of(kept, n_rows)]
    gradients = [grad]  # of the sums of each layer, from the last one on
    for i in range(len(layers) - 1, 0, -1):
        n_in, is_output = layers[i], i == len(layers) - 1
        n_units = max(n_out) if is_output else layers[i + 1]
        tile = _back_tile(x.device, n_in, is_output)
        below = torch.empty_like(seen[i])
        back_kernel[(_div(n_rows, tile["B"]), _div(n_in, tile["K"]), n_towers)](
            gradients[-1], weights, place[i], second, seen[i], below, largest, n_rows, n_units,
            n_in, *outs, N=16 if is_output and n_units <= 16 else min(_padded(n_units), 64),
            ACTIVATION=activation, OUTPUTS=is_output, SCALED=is_scaled, **tile,
        )  # fmt: skip
        gradients.append(below)
    gradients.reverse()
    n_values = sum(sizes.n_values)
    n_tiles = max(_div(n, 128) * _div(k, 128) for n, k in pairwise(layers))
    n_programs = 2 * _properties(x.device)[0]  # at most, in the widest layer
    n_parts = max(1, min(_div(n_rows, _ROWS_OF_A_PART), n_programs // (n_tiles * n_towers)))
    n_each = _div(_div(n_rows, n_parts), 64) * 64
    n_parts = _div(n_rows, n_each)
    parts = torch.empty(n_parts, n_values, device=x.device)
    for i, dz in enumerate(gradients):
        is_first, is_output = i == 0, i == len(layers) - 1
        n_in, n_units = layers[i], max(n_out) if is_output else layers[i + 1]
        n, k = min(_padded(n_units), 128), min(_padded(n_in), 128)
        weights_kernel[(n_parts, _div(n_units, n) * _div(n_in, k), n_towers)](
            dz, seen[i], 0 if is_first else n_rows * n_in, parts, place[i], second, n_values,
            largest, n_rows, n_each, n_units, n_in, *outs, B=64, N=n, K=k,
            KIND=_kind(kind), FIRST=is_first, OUTPUTS=is_output, SCALED=is_scaled,
            num_warps=4, num_stages=3 if _has_much_memory(x.device) else 2,
        )  # fmt: skip
    found = torch.empty(n_values, device=x.device)
    sum_of_parts_kernel[(_div(n_values, 128),)](parts, found, n_parts, n_values, C=128, R=16)
    return found


@dense_chains_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    params: Tensor,
    kept: Tensor,
    layers: list[int],
    n_out: list[int],
    activation: str,
) -> Tensor:
    return torch.empty_like(params)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, params, layers, n_out, activation, *_ = inputs
    ctx.save_for_backward(x, params, output[1])
    ctx.made = layers, n_out, activation


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return None, dense_chains_backward(grad, *ctx.saved_tensors, *ctx.made), *[None] * 5


dense_chains.register_autograd(_backward, setup_context=_keep)


class Chain(NamedTuple):
    """Dense layers of a graph, from the first hidden one to the outputs."""

    linears: list[Node]
    activation: str

    @property
    def x(self) -> Node:
        return self.linears[0].args[0]  # type: ignore[return-value]

    @property
    def sizes(self) -> list[int]:
        """Inputs, hidden units and outputs."""
        weights = [_shape(each.args[1]) for each in self.linears]
        return [weights[0][1], *(shape[0] for shape in weights)]


def fused(
    graph: GraphModule, kind: torch.dtype, *, keeps: bool, tell: Callable[[str], None] = print
) -> GraphModule:
    """``graph`` of torch.compile with its chains as one operator each; ``keeps`` for gradients.

    Kernels that fail on this device, or compute something else than torch, are not used.
    """
    graph.graph.eliminate_dead_code()  # the critic alone does not need the actor
    chains = [chain for node in graph.graph.nodes if (chain := _chain_to(node)) is not None]
    while chains:
        first = chains.pop(0)
        pair = [each for each in chains if _go_together(first, each)][:1]
        chains = [each for each in chains if each not in pair]
        towers = [first, *pair]
        sizes = Sizes(first.sizes[:-1], [chain.sizes[-1] for chain in towers])
        device = first.x.meta["example_value"].device
        reason = _why_not(device, tuple(sizes.layers), tuple(sizes.n_out), first.activation, kind)
        if reason is None:
            _replace(graph.graph, towers, sizes, kind, keeps=keeps)
        else:
            tell(f"dense layers are not fused and run slower: {reason}")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@cache
def _why_not(
    device: torch.device,
    layers: tuple[int, ...],
    n_out: tuple[int, ...],
    activation: str,
    kind: torch.dtype,
) -> str | None:
    """Why the kernels must not be used; compares them with float64 on made-up rows."""
    try:
        error = largest_error(Sizes([*layers], [*n_out]), activation, kind, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # no compiler, no headers, too little shared memory
        return type_and_line(failure)
    limit = _LIMITS[kind]
    return None if error < limit else f"the kernels are {error:.1g} from torch, above {limit:.1g}"


def largest_error(
    sizes: Sizes, activation: str, kind: torch.dtype, device: torch.device, n_rows: int = 700
) -> float:
    """Of the outputs, and of the gradient of each weight and bias, relative to its norm."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, grad = drawn(n_rows, sizes.layers[0]), drawn(n_rows, sum(sizes.n_out)) / n_rows
    activated = {"tanh": torch.tanh, "relu": torch.relu}[activation]
    exact: list[Tensor] = []
    towers: list[Tensor] = []
    with torch.enable_grad():
        for n_out in sizes.n_out:
            seen = x.double()
            for i, (n_in, n_units) in enumerate(pairwise([*sizes.layers, n_out])):
                weight, bias = drawn(n_units, n_in) / n_in**0.5, 0.1 * drawn(n_units)
                exact += [each.double().requires_grad_() for each in (weight, bias)]
                seen = activated(seen) if i > 0 else seen
                seen = torch.nn.functional.linear(seen, *exact[-2:])
            towers.append(seen)
        expected = torch.cat(towers, dim=1)
        gradients = torch.autograd.grad(expected, exact, grad.double())
    with torch.no_grad():
        params = torch.cat([each.flatten() for each in exact]).float()
        what = (*sizes, activation)
        out, kept = dense_chains(x, params, *what, kind, keeps=True)
        found = dense_chains_backward(grad, x, params, kept, *what)
        parts = torch.split(found, [each.numel() for each in exact])
        pairs = [(out, expected), *zip(parts, gradients, strict=True)]
        errors = [
            torch.linalg.vector_norm(ours.double() - theirs.reshape(ours.shape))
            / torch.linalg.vector_norm(theirs)
            for ours, theirs in pairs
        ]
        return float(torch.stack(errors).nan_to_num(torch.inf).max())


def _chain_to(node: Node) -> Chain | None:
    """The longest chain that ends with ``node``, if the kernels cover it."""
    if not _is_linear(node):
        return None
    linears, activation = [node], ""
    while (before := _activated(linears[0].args[0])) is not None:
        name, below = before
        if activation not in ("", name):
            break
        activation = name
        linears.insert(0, below)
    chain = Chain(linears, activation)
    if len(linears) < 2 or any(_activated_later(node)):
        return None
    return chain if _is_covered(chain) else None


def _is_covered(chain: Chain) -> bool:
    x, (_, *hidden, n_out) = chain.x.meta.get("example_value"), chain.sizes
    return (
        isinstance(x, Tensor)
        and x.dim() == 2
        and x.dtype == torch.float32
        and not x.requires_grad
        and x.shape[0] >= _FEWEST_ROWS
        and max(hidden) <= _WIDEST
        and n_out <= _MOST_OUTPUTS
    )


def _is_linear(node: Any) -> bool:
    if not (isinstance(node, Node) and node.op == "call_function" and node.target in _LINEAR):
        return False
    inputs = [*node.args, *node.kwargs.values()]
    return len(node.args) == 3 and len(inputs) == 3 and all(isinstance(n, Node) for n in inputs)


def _activated(node: Any) -> tuple[str, Node] | None:
    """Name and input of an activation of a dense layer, if nothing else reads either."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    name, below = _ACTIVATIONS.get(node.target), node.args[0] if node.args else None
    if name is None or node.kwargs.get("inplace") or len(node.users) != 1:
        return None
    if not (isinstance(below, Node) and _is_linear(below) and len(below.users) == 1):
        return None
    return name, below


def _activated_later(node: Node) -> list[Node]:
    """Activations that make ``node`` a hidden layer of a longer chain."""
    users = [user for user in node.users if _activated(user) is not None]
    return [user for user in users if any(map(_is_linear, user.users))]


def _go_together(one: Chain, other: Chain) -> bool:
    same = _are_same(one.x, other.x) and one.activation == other.activation
    return same and one.sizes[:-1] == other.sizes[:-1]


def _are_same(one: Any, other: Any) -> bool:
    """Whether two values of a graph are equal: both networks flatten the same observations."""
    if not (isinstance(one, Node) and isinstance(other, Node)) or one is other:
        return bool(one == other)
    return (
        one.op == "call_method"
        and one.target in _VIEWS
        and (one.op, one.target, one.kwargs) == (other.op, other.target, other.kwargs)
        and len(one.args) == len(other.args)
        and all(map(_are_same, one.args, other.args))
    )


def _replace(
    graph: torch.fx.Graph, chains: list[Chain], sizes: Sizes, kind: torch.dtype, *, keeps: bool
) -> None:
    linears = [linear for chain in chains for linear in chain.linears]
    read: list[Any] = [parameter for linear in linears for parameter in linear.args[1:]]
    order = {node: number for number, node in enumerate(graph.nodes)}
    place: Node = max([chains[0].x, *read], key=lambda node: order[node])

    def then(function: Callable[..., Any], *arguments: Any) -> Node:
        nonlocal place
        with graph.inserting_after(place):
            place = graph.call_function(function, arguments)
        return place

    params = then(torch.cat, [then(torch.flatten, each) for each in read])
    fused_layers = torch.ops.ml_pipeline.dense_chains.default
    what = (*sizes, chains[0].activation, kind, keeps)
    made = then(fused_layers, chains[0].x, params, *what)
    out, begin = then(operator.getitem, made, 0), 0
    for chain, size in zip(chains, sizes.n_out, strict=True):
        chain.linears[-1].replace_all_uses_with(then(torch.narrow, out, 1, begin, size))
        begin += size


def _shape(node: Any) -> Sequence[int]:
    shape: Sequence[int] = node.meta["example_value"].shape
    return shape


def _new_kept(x: Tensor, sizes: Sizes, kind: torch.dtype) -> Tensor:
    return x.new_empty(len(sizes.n_out) * x.shape[0] * sum(sizes.layers[1:]), dtype=kind)


def _div(number: int, by: int) -> int:
    return -(-number // by)


def _padded(size: int) -> int:
    """Tensor cores require powers of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


# Measured on an H200: rows, units and inputs of a tile.
def _tile(device: torch.device, n_units: int, is_narrow: bool) -> dict[str, int]:
    n = min(_padded(n_units), 128 if is_narrow else _WIDEST_TILE)
    if n > 128:
        stages = 3 if _has_much_memory(device) else 2
        k = 64 if _has_much_memory(device) else 32
        return {"B": 128, "N": n, "K": k, "num_warps": 8, "num_stages": stages}
    return {"B": 64, "N": n, "K": 64, "num_warps": 4, "num_stages": 2 if is_narrow else 3}


def _back_tile(device: torch.device, n_in: int, is_output: bool) -> dict[str, int]:
    k = min(_padded(n_in), 128 if is_output else _WIDEST_TILE)
    if k > 128:
        stages = 3 if _has_much_memory(device) else 2
        return {"B": 128, "K": k, "num_warps": 8, "num_stages": stages}
    return {"B": 64, "K": k, "num_warps": 4, "num_stages": 2 if is_output else 3}


def _has_much_memory(device: torch.device) -> bool:
    return _properties(device)[1] >= _ENOUGH_MEMORY


def _properties(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and shared memory of each."""
    if device.type != "cuda":
        return 4, _ENOUGH_MEMORY  # Triton's interpreter
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, int(getattr(found, "shared_memory_per_block_optin", 0))


def _kind(kind: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float16 if kind == torch.float16 else tl.bfloat16
