"""Networks: shapes for every observation, and recurrent state that resets at episode starts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from differences import linear_differences
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.device import precision_of_products
from ml_pipeline.policy.image_networks import CNN, DictNetwork
from ml_pipeline.policy.impala import Impala
from ml_pipeline.policy.min_gru import MinGRU, all_linear_steps
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.policy.unrolled import all_steps
from ml_pipeline.targets import import_dotted

VECTOR = spaces.Box(-1, 1, (3,))
SMALL_CNN = {"channels": [4], "kernels": [3], "strides": [1], "hidden_size": 8}


@pytest.mark.parametrize("network", [MLP, CNN, DictNetwork, Recurrent])
def test_networks_load_by_the_paths_in_old_configs(network: type[torch.nn.Module]) -> None:
    old_path = f"ml_pipeline.agents.networks.{network.__name__}"

    assert import_dotted(old_path, key="network._target_") is network


def test_mlp_concatenates_the_leaves_of_a_dict() -> None:
    space = spaces.Dict({"a": VECTOR, "b": spaces.Box(-1, 1, (2, 2))})
    network = MLP(space, hidden_sizes=[5], activation="relu")

    features = network({"a": torch.ones(6, 3), "b": torch.ones(6, 2, 2)})

    assert network.layers[0].in_features == 7
    assert features.shape == (6, 5)


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 4), (84, 84), (84, 96, 3)])
def test_default_cnn_is_the_nature_network_for_every_channel_order(shape: Any) -> None:
    network = CNN(spaces.Box(0, 1, shape))

    assert network(torch.rand(2, *shape)).shape == (2, 512)
    convolutions = [each for each in network.layers if isinstance(each, torch.nn.Conv2d)]
    assert [each.out_channels for each in convolutions] == [32, 64, 64]
    assert convolutions[0].in_channels == (1 if len(shape) == 2 else min(shape))


@pytest.mark.parametrize(("pooled", "n_inputs"), [(1, 32), (2, 4 * 32), (None, 11 * 11 * 32)])
def test_impala_pools_before_its_dense_layer(pooled: int | None, n_inputs: int) -> None:
    network = Impala(spaces.Box(0, 1, (84, 84, 4)), pooled=pooled)

    features = network(torch.rand(2, 84, 84, 4))

    assert features.shape == (2, 256)
    dense = [each for each in network.modules() if isinstance(each, torch.nn.Linear)]
    assert [each.in_features for each in dense] == [n_inputs]
    # Three stages of one convolution and two residual blocks of two.
    assert sum(isinstance(each, torch.nn.Conv2d) for each in network.modules()) == 3 * 5


def test_impala_gives_the_same_features_for_channels_first_and_last() -> None:
    first, last = (Impala(spaces.Box(0, 1, shape)) for shape in ((2, 16, 16), (16, 16, 2)))
    last.load_state_dict(first.state_dict())
    image = torch.rand(3, 2, 16, 16)

    torch.testing.assert_close(first(image), last(image.permute(0, 2, 3, 1)))


def test_cnn_gives_the_same_features_for_channels_first_and_last() -> None:
    first = CNN(spaces.Box(0, 1, (2, 9, 9)), **SMALL_CNN)
    last = CNN(spaces.Box(0, 1, (9, 9, 2)), **SMALL_CNN)
    last.load_state_dict(first.state_dict())
    image = torch.rand(1, 2, 9, 9, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(last(image.permute(0, 2, 3, 1)), first(image))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_cnn_gives_the_same_features_on_a_gpu(precision: str) -> None:
    device = torch.device("cuda")
    cnn = CNN(spaces.Box(0.0, 1.0, (4, 84, 84)))
    images = torch.rand(6, 4, 84, 84, generator=torch.Generator().manual_seed(1))

    expected = cnn(images)
    with precision_of_products(precision, device):
        features = cnn.to(device)(images.to(device)).cpu()

    tolerance = 1e-5 if precision == "float32" else 1e-2
    assert (features - expected).norm() <= tolerance * expected.norm()


def test_dict_network_uses_images_and_vectors_together() -> None:
    torch.manual_seed(1)  # with other seeds, all units of such a small CNN may be 0
    space = spaces.Dict({"camera": spaces.Box(0, 1, (3, 9, 9)), "arm": VECTOR})
    network = DictNetwork(space, hidden_sizes=[5], cnn=SMALL_CNN)
    obs = {"camera": torch.rand(4, 3, 9, 9), "arm": torch.rand(4, 3)}

    features = network(obs)

    assert features.shape == (4, network.out_features) == (4, 5)
    assert network.mlp.layers[0].in_features == 8 + 3
    for changed in ("camera", "arm"):
        other = network({**obs, changed: obs[changed] + 0.5})
        assert not torch.equal(other, features)


class Unrolled(NamedTuple):
    """A recurrent network on a sequence with episode starts in its middle, and its gradients."""

    features: Tensor
    state: Tensor
    gradients: list[Tensor]  # of the first state and of all parameters


def network_with(cell: str) -> Recurrent:
    torch.manual_seed(1)
    return Recurrent(VECTOR, cell=cell, size=6)


def unrolled(network: Recurrent, *, n_steps: int, steps_per_call: int, run: Any = None) -> Unrolled:
    draw, device = torch.Generator().manual_seed(n_steps), next(network.parameters()).device
    obs = torch.randn(n_steps, 4, 3, generator=draw).to(device)
    first = torch.randn(4, network.state_size, generator=draw).to(device).requires_grad_()
    starts = torch.rand(n_steps, 4, generator=draw).to(device) < 0.25
    starts[0] = torch.tensor([True, False, False, False])
    parts, state, call = [], first, network if run is None else run
    for t in range(0, n_steps, steps_per_call):
        rows = slice(t, t + steps_per_call)
        part, state = call(obs[rows], state, starts[rows])
        parts.append(part)
    features = torch.cat(parts)
    weights = torch.linspace(-1.0, 2.0, features.numel(), device=device).view_as(features)
    total = (features * weights).sum() + state.square().sum()
    return Unrolled(
        features, state, list(torch.autograd.grad(total, [first, *network.parameters()]))
    )


cells = pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])


@cells
@pytest.mark.parametrize("n_steps", [1, 2, 7, 16, 33])
def test_sequence_gives_the_same_features_and_gradients_as_single_steps(
    cell: str, n_steps: int
) -> None:
    network = network_with(cell)

    whole = unrolled(network, n_steps=n_steps, steps_per_call=n_steps)
    single = unrolled(network, n_steps=n_steps, steps_per_call=1)

    torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("n_steps", [1, 16])
def test_starts_as_data_give_the_same_features_and_gradients_as_starts_on_the_host(
    cell: str, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_with(cell)
    on_host = unrolled(network, n_steps=n_steps, steps_per_call=n_steps)

    monkeypatch.setattr(Recurrent, "_in_segments", Recurrent._step_by_step)
    as_data = unrolled(network, n_steps=n_steps, steps_per_call=n_steps)

    torch.testing.assert_close(as_data, on_host, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n_gates", "state_size"), [(4, 6), (3, 3)], ids=["lstm", "gru"])
def test_all_steps_keep_the_contract_of_an_operation_of_torch(
    n_gates: int, state_size: int
) -> None:
    shapes = (5, 4, n_gates * 3), (n_gates * 3, 3), (n_gates * 3,), (4, state_size)
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]

    # Schema, shapes and strides for the compiler, and how the gradient is registered.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    found = torch.library.opcheck(all_steps, (*given, torch.rand(5, 4) < 0.3), test_utils=checks)

    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backwards", [False, True])
def test_linear_steps_keep_the_contract_of_an_operation_of_torch(backwards: bool) -> None:
    kept, new = torch.rand(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    found = torch.library.opcheck(all_linear_steps, (kept, new, backwards), test_utils=checks)

    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.slow
@cells
def test_a_sequence_and_its_gradients_compile_as_one_graph(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recurrent, "_in_segments", Recurrent._step_by_step)
    network = network_with(cell)
    plain = unrolled(network, n_steps=5, steps_per_call=5)
    torch.compiler.reset()  # it limits how often one function is compiled

    with torch._dynamo.config.patch(allow_rnn=True):  # as ``Programs.compiled`` sets it
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        found = unrolled(network, n_steps=5, steps_per_call=5, run=compiled)

    torch.testing.assert_close(found, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(("n_steps", "n_columns"), [(1, 1), (9, 5), (32, 300), (33, 5000)])
def test_the_kernel_of_mingru_computes_the_same_steps(n_steps: int, n_columns: int) -> None:
    pytest.importorskip("triton", reason="comes with torch's CUDA builds")

    found = linear_differences(n_steps, n_columns, torch.device("cuda"))

    assert all(each <= 1e-5 for each in found.values()), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@cells
def test_a_recurrent_network_gives_the_same_features_and_gradients_on_a_gpu(cell: str) -> None:
    network = network_with(cell)
    expected = unrolled(network, n_steps=16, steps_per_call=16)

    found = unrolled(network.to("cuda"), n_steps=16, steps_per_call=16)

    on_cpu = Unrolled(found.features.cpu(), found.state.cpu(), [g.cpu() for g in found.gradients])
    torch.testing.assert_close(on_cpu, expected, rtol=1e-3, atol=1e-4)


@cells
@pytest.mark.parametrize("on_host", [True, False])
def test_episode_start_resets_the_recurrent_state_and_clears_a_nan(
    cell: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setattr(Recurrent, "_in_segments", Recurrent._step_by_step)
    network = network_with(cell)
    obs, size = torch.randn(4, 1, 3), network.state_size
    starts = torch.tensor([[False], [False], [True], [False]])

    features, _ = network(obs, torch.full((1, size), torch.nan), starts)
    fresh, _ = network(obs[2:], torch.zeros(1, size), starts[2:])

    assert features[:2].isnan().all()
    torch.testing.assert_close(features[2:], fresh)


def test_a_step_of_mingru_by_hand() -> None:
    cell = MinGRU(1, 1)
    with torch.no_grad():
        cell.gate_and_candidate.weight.copy_(torch.tensor([[0.0], [2.0]]))
        cell.gate_and_candidate.bias.copy_(torch.tensor([math.log(3.0), 1.0]))
    x, starts = torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[False], [False]])

    states, _ = cell(x, torch.tensor([[4.0]]), starts)

    # The gate is 3/4; the candidates are 2 x + 1.
    assert states.flatten().tolist() == pytest.approx([0.25 * 4 + 0.75 * 3, 0.25 * 3.25 + 3.75])


def test_encoder_is_built_from_its_dotted_path() -> None:
    encoder = {"_target_": "ml_pipeline.policy.networks.MLP", "hidden_sizes": [7]}

    network = Recurrent(VECTOR, encoder=encoder)

    assert network.cell.input_size == 7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CNN(spaces.Box(0, 1, (3, 20, 20))), r"kernels .* too large for an image of shape"),
        (lambda: CNN(VECTOR), "must be one image"),
        (lambda: CNN(spaces.Box(0, 1, (9, 3, 9))), r"channels in the middle: \(9, 3, 9\)"),
        (lambda: CNN(spaces.Box(0, 1, (9, 9)), kernels=[3]), "kernels must have one item per"),
        (lambda: MLP(VECTOR, hidden_sizes=[]), "hidden_sizes must be positive"),
        (lambda: MLP(VECTOR, activation="sin"), r"activation must be tanh \| relu"),
        (lambda: Recurrent(VECTOR, cell="rnn"), r"lstm \| gru \| mingru, got rnn"),
        (lambda: Recurrent(VECTOR, size=0), "size must be positive"),
    ],
)
def test_wrong_network_arguments_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
