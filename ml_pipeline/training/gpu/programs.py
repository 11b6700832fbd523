"""Programs: functions on tensors that are compiled, or captured as a CUDA graph and replayed.

A small PPO spends its time on starting kernels, not in them. A captured function starts all of its
kernels at once; so it must find its tensors where they were, leave its results there too, and
never wait for the device. What cannot be compiled or captured runs as it is, and says why once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ml_pipeline.errors import first_line

Function = TypeVar("Function", bound=Callable[..., Any])

# eager: as it is written. compiled: kernels that follow one another are made one. graph: that, and
# all of them are started at once.
MODES = ("eager", "compiled", "graph")
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Programs:
    """Makes functions faster on ``device`` as far as ``mode`` says; ``tell`` hears of failures."""

    def __init__(
        self,
        device: torch.device,
        mode: str = "eager",
        *,
        tell: Callable[[str], None] = print,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be {' | '.join(MODES)}, got {mode}")
        self.mode = mode
        self._device = device
        self.tell = tell
        self._compiles = mode != "eager" and _TORCH >= (2, 8)
        if mode != "eager" and not self._compiles:
            # Before, what a compiled function wrote to a row that is not aligned was lost.
            tell(f"torch {torch.__version__} compiles nothing here; from 2.8 on envs are faster")

    def compiled(self, function: Function, name: str) -> Function:
        """``function``, its kernels fused by torch.compile; no two of its tensors may overlap."""
        if not self._compiles:
            return function
        return _Compiled(function, name, self.tell)  # type: ignore[return-value]

    def captured(self, function: Callable[[], Any], name: str) -> Callable[[], Any]:
        """``function``, which is run once as it is, and from the second call on as a graph."""
        if self.mode != "graph" or self._device.type != "cuda":
            return function
        return _Captured(function, name, self._device, self.tell)


def send(numbers: Tensor, place: Tensor) -> None:
    """Copy from the host to a device without a wait for what the device is at."""
    if place.device.type == "cuda":
        place.copy_(numbers.pin_memory(), non_blocking=True)
    else:  # MPS would go on reading from memory that is given back by then
        place.copy_(numbers)


class _Compiled:
    def __init__(
        self, function: Callable[..., Any], name: str, tell: Callable[[str], None]
    ) -> None:
        self._function = function
        self._fast: Callable[..., Any] | None = torch.compile(
            _copy(function), dynamic=False, fullgraph=True
        )
        self._name = name
        self._tell = tell

    def __call__(self, *tensors: Any) -> Any:
        if self._fast is None:
            return self._function(*tensors)
        try:
            return self._fast(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no C compiler, an operation it does not know, a bug of it
            # Nothing was run: what fails is the making of it. If not, it will fail once more.
            self._fast = None
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._tell(f"{self._name} is not compiled, and runs slower: {reason}")
            return self._function(*tensors)


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    torch.compile counts by code object how often it has compiled something, and stops at eight: a
    process that trains many times, as a sweep or a notebook does, would soon be left without.
    """
    if not isinstance(function, FunctionType):
        return function
    copied = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Captured:
    """The first call runs as it is, which also lets every library set itself up; none is in vain:
    while a graph is captured nothing runs, so each call does its work exactly once."""

    def __init__(
        self,
        function: Callable[[], Any],
        name: str,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._function = function
        self._name = name
        self._tell = tell
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._n_calls = 0
        self._gave_up = False

    def __call__(self) -> Any:
        if self._graph is not None:
            self._graph.replay()
            return self._result
        self._n_calls += 1
        if self._gave_up:
            return self._function()
        if self._n_calls == 1:
            return self._run_aside()
        return self._capture()

    def _run_aside(self) -> Any:
        # On the stream of the capture: what autograd keeps for a parameter is bound to one.
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._function()
        current.wait_stream(self._stream)
        return result

    def _capture(self) -> Any:
        gc.collect()  # a graph of a run before must not be destroyed amid the capture
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves torch's own generator amid it: no draw would be taken then.
        generator = torch.cuda.default_generators[self._stream.device.index]
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = self._function()
        except torch.OutOfMemoryError:
            generator.graphsafe_set_state(before)
            raise
        except Exception as error:  # whatever waits for the device, or cannot be captured
            self._gave_up = True
            torch.cuda.synchronize()
            generator.graphsafe_set_state(before)
            first = _first(error)
            self._tell(
                f"{self._name} is not captured as a CUDA graph, and runs slower: "
                f"{type(first).__name__}: {first_line(first)}"
            )
            return self._function()
        self._graph = graph
        graph.replay()
        return self._result


def _first(error: BaseException) -> BaseException:
    """What went wrong first: leaving a broken capture fails once more."""
    while error.__context__ is not None:
        error = error.__context__
    return error
