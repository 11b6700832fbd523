"""What holds for the transition of every tensor env: no read from its device, and one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ml_pipeline.envs.tensor_env import TorchVectorEnv

READING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select"}
_FROM_THE_HOST = {"lift_fresh", "copy_"}  # torch.tensor(...) and similar


class Recorder(TorchDispatchMode):
    """Records every operation, and the dtype of every tensor it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func).split(".")[1])
        made = result if isinstance(result, (tuple, list)) else [result]
        self.dtypes |= {one.dtype for one in made if isinstance(one, Tensor)}
        return result


def check_stays_on_the_device(env: TorchVectorEnv) -> set[torch.dtype]:
    """Refuses a transition that reads from the device; returns the dtypes of all its tensors."""
    env.reset()
    action = torch.as_tensor(env.action_space.sample())

    with Recorder() as seen:
        env.transition(env.position, action)

    assert seen.names & (READING | _FROM_THE_HOST) == set()
    return seen.dtypes


def check_compiles_as_one_graph(env: TorchVectorEnv) -> None:
    env.reset()
    action = torch.as_tensor(env.action_space.sample())
    torch.compiler.reset()  # it limits how often one function is compiled
    compiled = torch.compile(env.transition, fullgraph=True, backend="aot_eager")

    position, result = compiled(env.position, action)

    wanted_position, wanted = env.transition(env.position, action)
    shown = [each for each in result if each is not None]
    expected = [each for each in wanted if each is not None]
    assert all(map(torch.equal, shown, expected))
    assert all(map(torch.equal, position.state, wanted_position.state))
