"""Programs: functions that are compiled or captured, or run as written and report why."""

from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_agents import CPU, agent_in
from tiny_torch_envs import Drift
from torch import Tensor

from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.training.graphs import Programs

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no compiler"
)
needs_torch_28 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="torch < 2.8 compiles nothing",
)


def on_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
    return pytest.mark.gpu(skip(test))


def nothing() -> None: ...


def test_eager_functions_are_the_functions_themselves() -> None:
    programs = Programs(CPU)

    assert programs.mode == "eager"
    assert programs.compiled(nothing, "nothing") is nothing
    assert programs.captured(nothing, "nothing") is nothing


@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_a_cpu_captures_no_graphs(mode: str) -> None:
    assert Programs(CPU, mode).captured(nothing, "nothing") is nothing


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eager \| compiled \| graph.*"):
        Programs(CPU, "fast")


class Uncompilable:
    """torch.compile cannot make one graph of these functions."""

    def __init__(self) -> None:
        self.n_calls = torch.zeros(())

    def branches_on_data(self, x: Tensor) -> Tensor:
        self.n_calls.add_(1.0)
        return x + 1.0 if bool(x.sum() > 0) else x - 1.0

    def breaks_the_graph(self, x: Tensor) -> Tensor:
        self.n_calls.add_(1.0)
        torch._dynamo.graph_break()
        return x + 1.0


@needs_torch_28
@pytest.mark.parametrize("name", ["branches_on_data", "breaks_the_graph"])
def test_a_function_that_cannot_be_compiled_runs_as_written_and_says_so_once(name: str) -> None:
    cases, lines = Uncompilable(), list[str]()
    programs = Programs(CPU, "compiled", tell=lines.append)
    program = programs.compiled(getattr(cases, name), "the sum")

    results = [program(torch.tensor([value])).item() for value in (1.0, 2.0, 3.0)]

    assert results == [2.0, 3.0, 4.0]
    assert cases.n_calls.item() == 3.0
    (line,) = lines
    assert line.startswith("the sum is not compiled")
    assert "\n" not in line


def test_an_error_of_the_function_itself_is_raised() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.reshape(7)

    program = Programs(CPU, "compiled", tell=lambda _: None).compiled(wrong, "wrong")

    with pytest.raises(RuntimeError, match="shape"):
        program(torch.zeros(3))


@pytest.mark.slow
@needs_compiler
def test_a_compiled_function_computes_the_same_numbers() -> None:
    lines: list[str] = []

    def write(x: Tensor, into: Tensor) -> None:
        into.copy_(x.sin() + x.cos())

    program = Programs(CPU, "compiled", tell=lines.append).compiled(write, "it")
    x, ours, plain = torch.linspace(0.0, 1.0, 9), torch.zeros(9), torch.zeros(9)
    for _ in range(2):
        program(x, ours)
        write(x, plain)
        torch.testing.assert_close(ours, plain)
        x = x + 1.0

    assert lines == []


@pytest.mark.slow
@needs_compiler
def test_many_programs_of_one_function_are_all_compiled() -> None:
    lines: list[str] = []
    programs = Programs(CPU, "compiled", tell=lines.append)

    def adding(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x + number

    for size in range(2, 13):  # torch compiles one code object at most eight times
        run = programs.compiled(adding(size), "a sum")
        assert run(torch.zeros(size)).tolist() == [size] * size

    assert lines == []


@pytest.mark.slow
@needs_compiler
def test_the_step_of_a_rollout_is_compiled_once() -> None:
    lines: list[str] = []
    programs = Programs(CPU, "compiled", tell=lines.append)
    collector = Collector([Drift(2)], env_seed=10, noise_seed=0, programs=programs)
    agent = agent_in(collector.envs[0])

    with torch._dynamo.config.patch(error_on_recompile=True):
        collector.collect(agent, collector.new_buffer(3, agent))

    assert lines == []


COMPILES_LATER = """
import atexit, sys, threading, torch
from ml_pipeline.training.graphs import Programs
programs = Programs(torch.device("cpu"), "compiled")
def is_importing():
    return "import of torch's compiler" in [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print(is_importing(), "at the end"))
programs.import_compiler()
print(is_importing())
"""


def lines_of(script: str, exit_code: int = 0) -> list[str]:
    command = [sys.executable, "-c", COMPILES_LATER + script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (exit_code, "")
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_import_of_the_compiler_ends_before_something_is_compiled() -> None:
    is_there = "print(is_importing(), 'torch._inductor.compile_fx' in sys.modules)"
    lines = lines_of(f"programs.compiled(torch.sin, 'the sine')\n{is_there}")

    assert lines == ["True", "False True", "False at the end"]


@pytest.mark.slow
def test_another_run_waits_for_the_import_of_the_compiler() -> None:
    lines = lines_of("Programs(torch.device('cpu'))\nprint(is_importing())")

    assert lines == ["True", "False", "False at the end"]


@pytest.mark.slow
def test_a_program_that_ends_waits_for_the_import_of_the_compiler() -> None:
    assert lines_of("sys.exit(7)", exit_code=7) == ["True", "False at the end"]


def test_programs_free_what_an_earlier_run_left_in_cycles() -> None:
    class Left:
        def __init__(self) -> None:
            self.itself = self

    left = weakref.ref(Left())
    assert left() is not None

    Programs(CPU, "compiled")

    assert left() is None


def captured(function: Callable[[], Any]) -> tuple[Callable[[], Any], list[str]]:
    lines: list[str] = []
    programs = Programs(torch.device("cuda"), "graph", tell=lines.append)
    return programs.captured(function, "the work"), lines


@on_gpu
def test_a_graph_runs_once_per_call_on_the_current_values_of_its_inputs() -> None:
    x, count = torch.zeros(3, device="cuda"), torch.zeros((), device="cuda")
    python_calls: list[int] = []

    def work() -> tuple[Tensor, Tensor]:
        python_calls.append(1)
        return x * 2.0, count.add_(1.0) * 10.0

    program, lines = captured(work)

    for n in range(1, 8):
        x.fill_(n + 0.5)
        doubled, tens = program()
        assert doubled.tolist() == [2.0 * n + 1.0] * 3
        assert (tens.item(), count.item()) == (10.0 * n, n)
    assert len(python_calls) == 2  # as written, and for the capture; then it is replayed
    assert lines == []


@on_gpu
def test_a_function_that_waits_for_the_device_is_not_captured_and_runs_as_written() -> None:
    count, x = torch.zeros((), device="cuda"), torch.ones(1000, device="cuda")

    def work() -> float:
        count.add_(1.0)
        return float(torch.nn.functional.dropout(x, 0.5).sum().item())  # waits for the device

    torch.cuda.manual_seed(1)
    plain = [work() for _ in range(4)]
    torch.cuda.manual_seed(1)
    program, lines = captured(work)

    assert [program() for _ in range(4)] == plain
    assert len(set(plain)) > 1
    assert count.item() == 8.0  # once per call
    (line,) = lines
    assert line.startswith("the work is not captured as a CUDA graph")
    assert "\n" not in line
    torch.randn(3, device="cuda")  # the generator still works
    # And another function can be captured.
    other, lines = captured(lambda: count.add_(1.0))
    for _ in range(4):
        other()
    assert count.item() == 12.0
    assert lines == []


@on_gpu
def test_a_captured_gradient_step_changes_the_weights_in_every_replay() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    grad = torch.zeros(4, device="cuda")
    weight.grad = grad

    def step() -> Tensor:
        grad.zero_()
        loss = weight.square().sum()
        torch.autograd.backward(loss)
        with torch.no_grad():
            weight.sub_(0.25 * grad)  # the gradient is 2 w, so each step halves w
        return loss.detach()

    program, lines = captured(step)

    losses = [program().item() for _ in range(4)]

    assert losses == [4.0, 1.0, 0.25, 0.0625]
    assert weight.tolist() == [0.0625] * 4
    assert lines == []


@on_gpu
def test_a_captured_function_may_call_a_compiled_one() -> None:
    lines: list[str] = []
    programs = Programs(torch.device("cuda"), "graph", tell=lines.append)
    x, into = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")

    def write(given: Tensor, place: Tensor) -> None:
        place.copy_(given.sin() + given.cos())

    inner = programs.compiled(write, "the inner function")
    program = programs.captured(lambda: inner(x, into), "the outer function")

    for value in (0.0, 1.0, 2.0, 3.0):
        x.fill_(value)
        program()
        torch.testing.assert_close(into, x.sin() + x.cos())
    assert lines == []
