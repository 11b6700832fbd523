"""Programs: functions on tensors that are compiled, or captured as a CUDA graph and replayed.

With small networks, launching kernels takes longer than running them. A graph launches all kernels
at once. A captured function must read and write tensors at fixed addresses, and must never wait
for the device. A function that cannot be compiled or captured runs eagerly; the user sees why once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ml_pipeline.errors import type_and_line

Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
Function = TypeVar("Function", bound=Callable[..., Any])

# eager: plain torch. compiled: consecutive kernels are fused. graph: they are also captured.
MODES = ("eager", "compiled", "graph")
_IMPORT = "import of torch's compiler"
_import: threading.Thread | None = None  # one for the process, as are its modules
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Programs:
    """Speeds up functions on ``device`` according to ``mode``; reports failures to ``tell``."""

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
        self.compiles = mode != "eager" and _TORCH >= (2, 8)
        _wait_for_import()
        if mode != "eager":
            gc.collect()  # an earlier run of this process may hold memory in reference cycles
        # The key precision= decides.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        if mode != "eager" and not self.compiles:
            # Older versions lose writes of a compiled function to an unaligned row.
            tell(f"torch {torch.__version__}: nothing is compiled; torch>=2.8 makes envs faster")

    def import_compiler(self) -> None:
        """Import torch's compiler in a thread, for several seconds, if ``compiled`` will need it.

        Meanwhile kernels can be built, most of it outside Python. Until ``compiled`` or another
        ``Programs`` has waited for it, no process may be forked: there, the import would never end.
        """
        global _import
        if self.compiles and _import is None:
            _import = threading.Thread(target=_import_compiler, name=_IMPORT, daemon=True)
            _import.start()
            atexit.register(_wait_for_import)  # Python may crash if it ends during an import

    def compiled(self, function: Function, name: str, rewrite: Rewrite | None = None) -> Function:
        """``function`` with its kernels fused by torch.compile; its tensors must not overlap.

        ``rewrite`` may change the graph of the function before.
        """
        if not self.compiles:
            return function
        _wait_for_import()
        return cast("Function", _Compiled(function, name, self.tell, rewrite))

    def captured(
        self,
        function: Callable[[], Any],
        name: str,
        generators: Sequence[torch.Generator | None] = (),
    ) -> Callable[[], Any]:
        """``function`` as a graph: the first call runs eagerly, later calls replay the graph.

        ``generators``: those on the device that it draws from; every replay draws new numbers.
        """
        if self.mode != "graph" or self._device.type != "cuda":
            return function
        drawn_from = [each for each in generators if each is not None]
        return _Captured(function, name, self._device, self.tell, drawn_from)


def send(numbers: Tensor, place: Tensor) -> None:
    """Copy from the host to a device without waiting for the device."""
    if place.device.type == "cuda":
        place.copy_(numbers.pin_memory(), non_blocking=True)
    else:  # MPS may still read the host memory after it is freed
        place.copy_(numbers)


class _Compiled:
    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        tell: Callable[[str], None],
        rewrite: Rewrite | None,
    ) -> None:
        self._function = function
        how: dict[str, Any] = {"options": _options()}
        if rewrite is not None:
            how = {"backend": partial(_compile_rewritten, rewrite)}
        self._fast: Callable[..., Any] | None = torch.compile(
            _copy(function), dynamic=False, fullgraph=True, **how
        )
        self._has_run = False
        self._name = name
        self._tell = tell

    def __call__(self, *tensors: Any) -> Any:
        if self._fast is None:
            return self._function(*tensors)
        try:
            result = self._fast(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no C compiler, an unknown operation, or a bug in torch
            if self._has_run and not is_of_compiler(error):
                raise  # a part of it may have run, so it must not run again
            # Compilation failed, so nothing ran. An error of the function itself is raised below.
            self._fast = None
            reason = type_and_line(getattr(error, "inner_exception", error))
            self._tell(f"{self._name} is not compiled and runs slower: {reason}")
            return self._function(*tensors)
        self._has_run = True
        return result


def _compile_rewritten(
    rewrite: Rewrite, graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    compiler = importlib.import_module("torch._inductor.compile_fx")
    compiled: Callable[..., Any] = compiler.compile_fx(
        rewrite(graph), inputs, config_patches=_options()
    )
    return compiled


def _import_compiler() -> None:
    with contextlib.suppress(Exception):  # compiling imports it again and reports the error
        importlib.import_module("torch._inductor.compile_fx")


def _wait_for_import() -> None:
    if _import is not None:
        _import.join()


def is_of_compiler(error: Exception) -> bool:
    """Whether torch's compiler failed, so that nothing ran."""
    errors = importlib.import_module("torch._dynamo.exc")
    return isinstance(error, errors.TorchDynamoException)


def _options() -> dict[str, Any] | None:
    """Options of torch.compile that make its result depend on nothing but the function.

    By default torch times several ways to add up, and a resumed run may choose another one. It
    still times several sizes of a block. One size (triton.autotune_pointwise) compiles faster, but
    was up to 1.2 times as slow in an env.
    """
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    if hasattr(dynamo, "allow_rnn"):
        dynamo.allow_rnn = True  # our networks only read the weights of an nn.LSTM or nn.GRU
    inductor = importlib.import_module("torch._inductor.config")  # slow, so not for every run
    return {"deterministic": True} if hasattr(inductor, "deterministic") else None


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function or method with its own code object.

    torch.compile compiles a code object at most eight times. A process that trains more often, such
    as a sweep or a notebook, would exceed that.
    """
    if isinstance(function, MethodType):
        return MethodType(_copy(function.__func__), function.__self__)
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
    """Each call does its work exactly once: capturing does not run anything.

    The first call runs eagerly, so that libraries can initialise themselves.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        name: str,
        device: torch.device,
        tell: Callable[[str], None],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._function = function
        self._name = name
        self._tell = tell
        self._generators = generators
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
        # On the stream of the capture: autograd binds its state for a parameter to a stream.
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._function()
        current.wait_stream(self._stream)
        return result

    def _capture(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves generators in capture mode, where every draw raises.
        device = self._stream.device.index
        generators = [torch.cuda.default_generators[device], *self._generators]
        before = [each.clone_state() for each in generators]
        for each in self._generators:
            graph.register_generator_state(each)
        try:
            with _no_collection(), torch.cuda.graph(graph, stream=self._stream):
                self._result = self._function()
        except torch.OutOfMemoryError:
            _restore(generators, before)
            raise
        except Exception as error:  # a wait for the device, or an operation without capture
            self._gave_up = True
            torch.cuda.synchronize()
            _restore(generators, before)
            first = _first(error)
            self._tell(
                f"{self._name} is not captured as a CUDA graph and runs slower: "
                f"{type_and_line(first)}"
            )
            return self._function()
        self._graph = graph
        graph.replay()
        return self._result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """An older graph that is garbage must not be destroyed during a capture.

    Collecting all garbage before takes 0.2 s, because torch's compiler leaves many objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _restore(generators: Sequence[torch.Generator], states: Sequence[torch.Generator]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.graphsafe_set_state(state)


def _first(error: BaseException) -> BaseException:
    """The original error: leaving a broken capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return error
