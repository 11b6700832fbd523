"""World: the ranks that train together, one process each, over torch.distributed.

``torchrun`` starts the ranks. Without it there is one rank, and every method returns its input. So
no other module asks whether training is distributed. All ranks must call the same methods in the
same order: each call waits for the others, until ``rank_timeout_seconds`` have passed.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.errors import UserError, last_line, shorten
from ml_pipeline.ranks.agreement import AgreedSignals
from ml_pipeline.ranks.batches import SharedBatches, WholeBatches
from ml_pipeline.ranks.minibatches import SharedMinibatches
from ml_pipeline.ranks.rendezvous import (
    RankError,
    choose_interface,
    is_launched,
    launched_rank,
    meet,
)
from ml_pipeline.ranks.shared_memory import MOST_BYTES, Number, RankMemory, is_usable, new_file

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ml_pipeline.signals import Signals

__all__ = ["ALONE", "RankError", "World", "join_world", "launched_rank", "rank_device"]

Value = TypeVar("Value")

_ROLL_CALL_SECONDS = 3.0
_WATCH_SECONDS = 1.0
_END_SECONDS = 6.0  # a rank that the others have lost ends within this time
_ROLL_CALL = "roll call"


def rank_device(device: torch.device) -> torch.device:
    """The GPU of this rank, if several ranks share a machine and the config names no index."""
    if not is_launched() or device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def join_world(device: torch.device, timeout_seconds: float) -> World:
    """The ranks that torchrun has started, or a single one; waits until all have joined."""
    if not is_launched():
        return World()
    # Not every build of torch has it.
    from torch._C._distributed_c10d import PrefixStore

    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        dist.destroy_process_group()  # an earlier run of this process
    # Two ranks cannot share a GPU with NCCL.
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    has_own_gpu = device.type == "cuda" and n_local <= torch.cuda.device_count()
    has_nccl = has_own_gpu and dist.is_nccl_available()
    choose_interface()
    store, _ = meet("", timeout_seconds)
    memory = None
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        hosts = _gathered(platform.node(), size)
        if is_usable():
            memory = _join_memory(rank, size, timeout_seconds)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {rank} on {platform.node()}: cannot connect to the other ranks "
            f"({shorten(last_line(error))}); open all ports between the machines, and name their "
            "network interface by GLOO_SOCKET_IFNAME"
        ) from error
    watchdog = _Watchdog(store, rank)
    return World(
        rank,
        size,
        hosts=hosts,
        has_nccl=has_nccl,
        store=store,
        watchdog=watchdog,
        memory=memory,
    )


def _join_memory(rank: int, size: int, timeout_seconds: float) -> RankMemory | None:
    """Shared memory of all ranks; None if one of them cannot open it, as in separate containers."""
    own = None
    with suppress(OSError):
        own = new_file(size) if rank == 0 else None
    try:
        places = _gathered((own, os.getpid()), size)
        file, memory = places[0][0], None
        with suppress(OSError, ValueError):  # mmap refuses an empty file with ValueError
            pids = [pid for _, pid in places]
            memory = None if file is None else RankMemory(file, rank, pids, timeout_seconds)
        have_joined = _gathered(memory is not None, size)
    finally:
        if own is not None:
            own.close()
    return memory if all(have_joined) else None


class World:
    """The rank of this process and the number of ranks; the default is a single process.

    As a context manager it reports an error of this rank to the others and leaves them.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        hosts: Sequence[str] = (),
        has_nccl: bool = False,
        store: Store | None = None,
        watchdog: _Watchdog | None = None,
        memory: RankMemory | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._hosts = hosts
        self._has_nccl = has_nccl
        self._store = store
        self._watchdog = watchdog
        self._memory = memory
        self._is_over = False
        self._is_apart = False

    @property
    def name(self) -> str:
        """For the user: "1 rank" or "2 ranks"."""
        return _counted(self.size)

    def where(self, device: torch.device) -> str:
        """For the user: "cpu", or "2 ranks, cpu"."""
        return f"{device}" if self.size == 1 else f"{self.name}, {device}"

    def all_envs(self, n_envs: int) -> int:
        """How many envs all ranks have; each has ``n_envs``."""
        return self.size * n_envs

    def envs(self, n_envs: int) -> slice:
        """The envs of this rank among those of all; each rank has ``n_envs``."""
        return slice(self.rank * n_envs, (self.rank + 1) * n_envs)

    def minibatches(self, n_rows: int, n_envs: int, n_minibatches: int) -> SharedMinibatches | None:
        """What this rank has of the minibatches of all ranks; each has [n_rows, n_envs].

        None for one rank, which has all of each.
        """
        if self.size == 1:
            return None
        n_all, own = self.all_envs(n_envs), self.envs(n_envs)
        return SharedMinibatches(n_rows, n_all, own, n_minibatches, self.sum_array)

    def batches(self, n_envs: int) -> WholeBatches | SharedBatches:
        """What this rank has of the batches of all ranks; each has ``n_envs``."""
        if self.size == 1:
            return WholeBatches()
        return SharedBatches(self.rank, n_envs, self.all_envs(n_envs), self.sum)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks; changes ``tensor`` in place."""
        if self.size == 1:
            return tensor
        is_summed_on_gpu = self._has_nccl and tensor.is_cuda
        own = tensor if is_summed_on_gpu else tensor.cpu()  # the same tensor on a CPU
        with self._others_named():
            if self._memory is None or is_summed_on_gpu or tensor.nbytes > MOST_BYTES:
                dist.all_reduce(own)
            else:
                self._memory.add(own.view(-1).numpy())
        return tensor if own is tensor else tensor.copy_(own)

    def sum_array(self, array: NDArray[Number]) -> None:
        """``sum`` of a flat array."""
        if self._memory is not None and array.nbytes <= MOST_BYTES:
            with self._others_named():
                self._memory.add(array)
        else:
            self.sum(torch.from_numpy(array))

    def max(self, numbers: Sequence[int]) -> list[int]:
        """The maxima over all ranks, element by element."""
        if self.size == 1:
            return list(numbers)
        own = np.array(numbers, np.int64)
        with self._others_named():
            if self._memory is not None:
                own = self._memory.parts(own).max(0)
            else:
                dist.all_reduce(torch.from_numpy(own), dist.ReduceOp.MAX)
        return [int(each) for each in own]

    def agreed(self, value: Value) -> Value:
        """The value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        with self._others_named():
            dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def gathered(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        with self._others_named():
            if self._memory is not None and (found := self._memory.objects(value)) is not None:
                return found
            return _gathered(value, self.size)

    def joined(self, items: list[Value]) -> list[Value]:
        """The items of all ranks in one list."""
        return [item for part in self.gathered(items) for item in part]

    def average(self, grad_and_loss: Tensor, loss: Tensor, share: float) -> Tensor:
        """Average a gradient in place, weighted by ``share``; returns the average ``loss``.

        ``share`` is this rank's part of the minibatch; the shares of all ranks add up to 1. The
        last element is for the loss: one sum carries both, so all ranks see the same non-finite
        values.
        """
        if self.size == 1:
            return loss
        grad_and_loss[-1] = loss
        return self.sum(grad_and_loss.mul_(share))[-1].clone()

    def average_array(self, grad_and_loss: NDArray[np.float32], loss: float, share: float) -> float:
        """``average`` of an array on the CPU."""
        if self.size == 1:
            return loss
        grad_and_loss[-1] = loss
        grad_and_loss *= share
        self.sum_array(grad_and_loss)
        return float(grad_and_loss[-1])

    def weighted(self, values: Tensor, share: float) -> Tensor:
        """The average of means over parts of a minibatch, each with the ``share`` of its rank."""
        return values if self.size == 1 else self.sum(values * share)

    def moments(self, mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
        """Mean, variance and count of the samples of all ranks together."""
        if self.size == 1:
            return mean, variance, count
        first, second = mean.double(), variance.double() + mean.double().square()
        number = torch.full((1,), float(count), dtype=torch.float64, device=mean.device)
        parts = [(first * count).flatten(), (second * count).flatten(), number]
        sums = self.sum(torch.cat(parts))
        total = int(sums[-1])
        first, second = (sums[:-1] / total).view(2, *mean.shape)
        merged = (second - first.square()).clamp(min=0.0)
        return first.to(mean.dtype), merged.to(mean.dtype), total

    def check_equal(self, tensors: Callable[[], Sequence[Tensor]], what: str) -> None:
        """Raise unless these float32 tensors have the same bits on all ranks."""
        if self.size == 1:
            return
        values = torch.cat([each.flatten() for each in tensors()])
        bits = values.detach().cpu().numpy().ravel().view(np.int32).astype(np.int64)
        checksums = np.zeros(self.size, np.int64)
        checksums[self.rank] = bits @ np.arange(1, len(bits) + 1)  # may wrap, which is harmless
        own = checksums[self.rank]
        self.sum_array(checksums)
        others = [rank for rank, each in enumerate(checksums) if each != own]
        if others:
            raise RankError(
                f"rank {self.rank}: {what} differ from those of ranks {others}; "
                "use the same code, config and versions on all ranks"
            )

    def parts(self, make: Callable[[], Value]) -> list[Value]:
        """``make()`` of all ranks, in their order; empty for one, whose state is the whole."""
        return [] if self.size == 1 else self.gathered(make())

    def misfit(self, n_ranks: int) -> str:
        """Why parts that ``n_ranks`` saved do not fit these ranks; empty if they do."""
        if n_ranks == self.size:
            return ""
        return f"{_counted(n_ranks)} saved them, this run has {self.size}"

    def refuse(self, reason: str, error: type[UserError] = UserError) -> None:
        """Raise ``error`` if there are several ranks."""
        if self.size > 1:
            raise error(reason)

    def why_no_graphs(self) -> str:
        """Why the work of a gradient step cannot be captured; empty if it can."""
        return "" if self.size == 1 else f"{self.name} use no graphs; none has an all-reduce"

    @property
    def is_awaited(self) -> bool:
        """Whether others wait for this rank: it must join them, and end at once after an error."""
        return self.size > 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block in which the ranks compute; after an error in it they wait for nobody."""
        self._is_apart = self.size > 1
        yield
        self._is_apart = False

    @property
    def is_reachable(self) -> bool:
        """Whether all ranks wait for the decision of rank 0."""
        return not self._is_apart

    def agreed_signals(self, signals: Signals, agree: Callable[[], int]) -> Signals:
        """Signals that stop all ranks after the same iteration; those of one rank are its own.

        ``agree`` waits for the others, and returns the number of a signal that any of them got.
        """
        return signals if self.size == 1 else AgreedSignals(signals, agree)

    def expect_end(self) -> None:
        """From now on, the other ranks may leave; this rank blames none of them."""
        self._is_over = True

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._store is None or self._watchdog is None:
            return
        self._watchdog.ended.set()
        if self._memory is not None:
            self._memory.leave()
        cause = "it has finished"
        if error is not None:
            cause = f"{type(error).__name__}: {shorten(last_line(error), 300)}"
        if not isinstance(error, RankError):
            # If the store does not answer, the others notice that.
            _answer(partial(self._store.set, f"left/{self.rank}", cause))
        dist.destroy_process_group()

    @contextmanager
    def _others_named(self) -> Iterator[None]:
        """Name the ranks that are missing if a collective call fails."""
        try:
            yield
        except RuntimeError as error:
            reason = "the other ranks have left" if self._is_over else self._roll_call()
            raise RankError(reason) from error

    def _roll_call(self) -> str:
        """Who failed, and who does not answer; every rank that lost another one calls this."""
        store = self._store
        found = None if store is None else _answer(partial(self._missing, store))
        if found is None:
            lost = "killed or cut off" if self.rank else "lost its launcher"
            address = os.environ["MASTER_ADDR"]
            return f"{self._name(0)}: {lost}; the store of torchrun on {address} does not answer"
        left, missing = found
        faults = [f"{self._name(each)}: {cause}" for each, cause in left.items()]
        faults += [f"{self._name(each)}: killed, cut off or hanging" for each in missing]
        if missing and not left:
            faults[-1] += "; if it is only slow, raise rank_timeout_seconds"
        return "; ".join(faults) or f"rank {self.rank}: a connection between the ranks broke"

    def _missing(self, store: Store) -> tuple[dict[int, str], list[int]]:
        """The ranks that left, with their causes, and those that do not answer."""
        store.set(f"here/{self.rank}", "")
        store.set(_ROLL_CALL, "")
        missing, left = list(range(self.size)), list[int]()
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        while missing and time.monotonic() < deadline:
            left = [rank for rank in range(self.size) if store.check([f"left/{rank}"])]
            missing = [each for each in missing if not store.check([f"here/{each}"])]
            missing = [each for each in missing if each not in left]
            time.sleep(0.05)
        return {each: store.get(f"left/{each}").decode() for each in left}, missing

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if self._hosts else f"rank {rank}"


def _gathered(value: Value, size: int) -> list[Value]:
    values: list[Value | None] = [None] * size
    dist.all_gather_object(values, value)
    return cast("list[Value]", values)


def _counted(n_ranks: int) -> str:
    return "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"


def _answer(ask: Callable[[], Value]) -> Value | None:
    """The answer of the store; None if it does not answer in time, as after a cut of the network.

    A call of a store that is cut off returns only after many minutes, so it gets its own thread.
    """
    answers: list[Value] = []

    def wait() -> None:
        with suppress(RuntimeError):  # the store has ended; there is no answer
            answers.append(ask())

    thread = threading.Thread(target=wait, name="call of the store", daemon=True)
    thread.start()
    thread.join(_ROLL_CALL_SECONDS + 2.0)
    return answers[0] if answers else None


class _Watchdog(threading.Thread):
    """Ends this process if the others have lost this rank and it does not end by itself.

    It also stops this rank, and with it all others, if torchrun was killed.
    """

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(name="rank watchdog", daemon=True)
        self.ended = threading.Event()
        self._store = store
        self._rank = rank
        # Without torchrun, the process that started this rank need not outlive it.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.start()

    def run(self) -> None:
        has_store = True
        while not self.ended.wait(_WATCH_SECONDS):
            if self._launcher not in (None, os.getppid()):  # killed, so it cannot end its ranks
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                is_lost = has_store and self._store.check([_ROLL_CALL])
            except RuntimeError:  # the launcher with the store has ended
                is_lost = has_store = False
            if is_lost and not self.ended.wait(_END_SECONDS):
                break
        else:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = f" in {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        print(
            f"rank {self._rank} on {platform.node()}: hanging{place} while the other ranks have "
            "stopped, so it ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


ALONE = World()
