"""Programs: functions that are compiled or captured, or run as they are and say why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml_pipeline.training.gpu.programs import Programs

CPU = torch.device("cpu")

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no compiler"
)


def test_eager_functions_are_the_functions_themselves() -> None:
    def nothing() -> None: ...

    programs = Programs(CPU)

    assert programs.mode == "eager"
    assert programs.compiled(nothing, "nothing") is nothing
    assert programs.captured(nothing, "nothing") is nothing


def test_a_cpu_has_no_graphs_whatever_the_mode() -> None:
    def nothing() -> None: ...

    assert Programs(CPU, "graph").captured(nothing, "nothing") is nothing
    assert Programs(CPU, "compiled").captured(nothing, "nothing") is nothing


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode must be eager \| compiled \| graph, got fast"):
        Programs(CPU, "fast")


class Cases:
    """What torch.compile cannot make one graph of."""

    def __init__(self) -> None:
        self.n_calls = torch.zeros(())

    def that_reads(self, x: Tensor) -> Tensor:
        """By the host, and goes on by what it has read."""
        self.n_calls.add_(1.0)
        return x + 1.0 if bool(x.sum() > 0) else x - 1.0

    def that_breaks_off(self, x: Tensor) -> Tensor:
        """Where the compiler is told to."""
        self.n_calls.add_(1.0)
        torch._dynamo.graph_break()
        return x + 1.0


@pytest.mark.parametrize("name", ["that_reads", "that_breaks_off"])
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(name: str) -> None:
    cases, said = Cases(), list[str]()
    program = Programs(CPU, "compiled", tell=said.append).compiled(getattr(cases, name), "the sum")

    results = [program(torch.tensor([value])).item() for value in (1.0, 2.0, 3.0)]

    assert results == [2.0, 3.0, 4.0]
    assert cases.n_calls.item() == 3.0
    (line,) = said
    assert line.startswith("the sum is not compiled, and runs slower: ")
    assert "\n" not in line


def test_an_error_of_the_function_itself_is_raised_and_not_swallowed() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.reshape(7)

    program = Programs(CPU, "compiled", tell=lambda _: None).compiled(wrong, "wrong")

    with pytest.raises(RuntimeError, match="shape"):
        program(torch.zeros(3))


@pytest.mark.slow
@needs_compiler
def test_a_compiled_function_gives_the_numbers_of_the_plain_one() -> None:
    said: list[str] = []

    def write(x: Tensor, into: Tensor) -> None:
        into.copy_(x.sin() + x.cos())

    program = Programs(CPU, "compiled", tell=said.append).compiled(write, "it")
    x, ours, plain = torch.linspace(0.0, 1.0, 9), torch.zeros(9), torch.zeros(9)
    for _ in range(2):
        program(x, ours)
        write(x, plain)
        torch.testing.assert_close(ours, plain)
        x = x + 1.0

    assert said == []


def captured(function: Callable[[], Any]) -> tuple[Callable[[], Any], list[str]]:
    said: list[str] = []
    programs = Programs(torch.device("cuda"), "graph", tell=said.append)
    return programs.captured(function, "the work"), said


@gpu
@needs_gpu
def test_each_call_of_a_captured_function_does_its_work_exactly_once() -> None:
    count = torch.zeros((), device="cuda")
    n_python_calls = 0

    def work() -> Tensor:
        nonlocal n_python_calls
        n_python_calls += 1
        count.add_(1.0)
        return count * 10.0

    program, said = captured(work)

    for n in range(1, 8):
        assert program().item() == 10.0 * n
        assert count.item() == n
    assert n_python_calls == 2  # as it is, and for the capture; then it is replayed
    assert said == []


@gpu
@needs_gpu
def test_the_results_of_a_graph_follow_what_its_inputs_hold_now() -> None:
    x = torch.zeros(3, device="cuda")
    program, said = captured(lambda: (x * 2.0, x + 1.0))

    for value in (1.0, 5.0, -3.0, 0.5):
        x.fill_(value)
        doubled, more = program()
        assert doubled.tolist() == [2.0 * value] * 3
        assert more.tolist() == [value + 1.0] * 3
    assert said == []


@gpu
@needs_gpu
def test_a_function_that_waits_for_the_device_falls_back_and_does_its_work_once_per_call() -> None:
    count = torch.zeros((), device="cuda")

    def work() -> float:
        count.add_(1.0)
        return float(count.item())  # waits: cannot be captured

    program, said = captured(work)

    assert [program() for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert count.item() == 5.0
    (line,) = said
    assert line.startswith("the work is not captured as a CUDA graph, and runs slower: ")
    assert "\n" not in line


@gpu
@needs_gpu
def test_after_a_capture_that_failed_another_function_can_be_captured() -> None:
    count = torch.zeros((), device="cuda")
    broken, _ = captured(lambda: count.item())
    for _ in range(3):
        broken()

    program, said = captured(lambda: count.add_(1.0))
    for _ in range(4):
        program()

    assert count.item() == 4.0
    assert said == []


@gpu
@needs_gpu
def test_a_function_with_dropout_that_cannot_be_captured_draws_on_as_if_nothing_had_been() -> None:
    x = torch.ones(1000, device="cuda")

    def work() -> float:
        return float(torch.nn.functional.dropout(x, 0.5).sum().item())  # waits

    torch.cuda.manual_seed(1)
    plain = [work() for _ in range(4)]
    torch.cuda.manual_seed(1)
    program, said = captured(work)

    assert [program() for _ in range(4)] == plain
    assert len(set(plain)) > 1
    assert len(said) == 1
    torch.randn(3, device="cuda")


@gpu
@needs_gpu
def test_a_gradient_step_can_be_captured_and_takes_effect_each_time() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    grad = torch.zeros(4, device="cuda")
    weight.grad = grad

    def step() -> Tensor:
        grad.zero_()
        loss = weight.square().sum()
        torch.autograd.backward(loss)
        with torch.no_grad():
            weight.sub_(0.25 * grad)  # the gradient is 2 w: each step halves it
        return loss.detach()

    program, said = captured(step)

    losses = [program().item() for _ in range(4)]

    assert losses == [4.0, 1.0, 0.25, 0.0625]
    assert weight.tolist() == [0.0625] * 4
    assert said == []


@gpu
@needs_gpu
def test_compiled_functions_inside_a_captured_one_give_the_plain_numbers() -> None:
    said: list[str] = []
    programs = Programs(torch.device("cuda"), "graph", tell=said.append)
    x, into = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")

    def write(given: Tensor, place: Tensor) -> None:
        place.copy_(given.sin() + given.cos())

    inner = programs.compiled(write, "the inner")
    program = programs.captured(lambda: inner(x, into), "the outer")

    for value in (0.0, 1.0, 2.0, 3.0):
        x.fill_(value)
        program()
        torch.testing.assert_close(into, x.sin() + x.cos())
    assert said == []


@pytest.mark.slow
@needs_compiler
def test_many_programs_of_one_function_are_all_compiled() -> None:
    told: list[str] = []
    programs = Programs(torch.device("cpu"), "compiled", tell=told.append)

    def adding(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x + number

    for size in range(2, 13):  # more than the eight times that torch compiles one code object
        run = programs.compiled(adding(size), "a sum")
        assert run(torch.zeros(size)).tolist() == [size] * size

    assert told == []
