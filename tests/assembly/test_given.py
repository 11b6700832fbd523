"""``train`` with classes and functions: envs, networks and callbacks."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import REPOSITORY, TESTS, Door, call, only_run, read_rows, small
from own_parts import Wide
from tiny_envs import CountingEnv
from torch import Tensor, nn

from ml_pipeline import load, train
from ml_pipeline.assembly.compose import ConfigError, plain_config
from ml_pipeline.errors import UserError
from ml_pipeline.given import name_of
from ml_pipeline.training.contracts import Callback, RunningLoop


class Longer(CountingEnv):
    """Another process can import it."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)


def _local_class() -> type[CountingEnv]:
    class Local(CountingEnv):
        """Another process cannot import it."""

    return Local


@pytest.mark.parametrize("mode", ["serial", pytest.param("parallel", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("env", "key", "stored"),
    [
        ("CartPole-v1", "id", "CartPole-v1"),
        ("tiny_envs.CountingEnv", "target", "tiny_envs.CountingEnv"),
        (CountingEnv, "target", "tiny_envs.CountingEnv"),
        ({"target": CountingEnv, "kwargs": {"length": 4}}, "target", "tiny_envs.CountingEnv"),
        (_local_class(), "target", r"__main__\.Local"),
        (lambda: CountingEnv(4), "target", r"__main__\.lambda(_\d)?"),
        (partial(CountingEnv, length=4), "target", r"__main__\.CountingEnv(_\d)?"),
        (
            {
                "target": Longer,
                "wrappers": {"own": {"_target_": gym.wrappers.OrderEnforcing}},
            },
            "target",
            "test_given.Longer",
        ),
    ],
)
def test_an_env_is_an_id_a_class_or_a_function(
    env: Any, key: str, stored: str, mode: str, here: Path
) -> None:
    run = train(small(vec_env=mode), env=env, quiet=True).run_dir

    assert re.fullmatch(stored, plain_config(run)["env"][key])
    policy = load(run)
    assert policy.action_space.contains(policy.predict(policy.observation_space.sample()))
    train(resume=run, total_steps=128, quiet=True)
    assert read_rows(run)[-1]["env_steps"] == "128"


SCRIPT = """
import sys
import gymnasium as gym
from torch import nn
from own_parts import Wide
from tiny_envs import CountingEnv
from ml_pipeline import load, train

class Mine(CountingEnv):
    pass

class Net(Wide):
    pass

if __name__ == "__main__":
    more = {"resume": sys.argv[1], "env": Mine, "network": Net} if len(sys.argv) > 1 else {}
    train(%r, **({"env": Mine, "network": {"_target_": Net, "width": 5}} | more))
"""


def test_resume_asks_for_a_class_that_this_process_does_not_know(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(small(), env=_local_class(), quiet=True).run_dir
    monkeypatch.setattr("ml_pipeline.given._given", {})  # as in another process

    with pytest.raises(UserError, match=r"^env\.target=__main__\.Local: .*; pass it again"):
        train(resume=run, total_steps=128, quiet=True)
    train(resume=run, total_steps=128, env=_local_class(), quiet=True)

    assert read_rows(run)[-1]["env_steps"] == "128"


@pytest.mark.slow
def test_class_of_a_script_reaches_workers_and_a_resume_asks_for_it(here: Path, door: Door) -> None:
    script, settings = here / "script.py", small(vec_env="parallel", vec_env__n_workers=1)
    script.write_text(SCRIPT % settings)
    paths = os.pathsep.join(map(str, (TESTS, REPOSITORY)))

    first = call(sys.executable, script, cwd=here, PYTHONPATH=paths)
    run = only_run(here)
    asked = door(f"resume={run}", "total_steps=128")
    script.write_text(SCRIPT % ["total_steps=128"])
    second = call(sys.executable, script, run, cwd=here, PYTHONPATH=paths)

    assert first.returncode == 0, first.stderr
    assert "target: __main__.Mine" in (run / "config.yaml").read_text()
    assert asked.stderr.splitlines()[-1] == (
        "env.target=__main__.Mine: was passed from Python and cannot be imported; pass it again, "
        "as in train(resume=RUN, env=Mine), or move it into a module"
    )
    assert "in the middle of its episodes" in second.stdout, second.stderr
    assert read_rows(run)[-1]["env_steps"] == "128"
    assert "width: 5" in (run / "config.yaml").read_text()


def test_a_class_that_is_defined_again_replaces_the_old_one_and_lambdas_differ() -> None:
    old, new = _local_class(), _local_class()

    assert name_of(old) == name_of(new) == name_of(old) == "__main__.Local"
    assert name_of(lambda: old) != name_of(lambda: new)


class SpaceFirst(nn.Module):
    def __init__(self, space: gym.Space[Any], width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(space.shape[0], width)
        self.out_features = width

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs)


@pytest.mark.parametrize(
    ("network", "width"),
    [
        (Wide, 8),
        ({"_target_": Wide, "width": 5}, 5),
        ("own_parts.Wide", 8),
        (SpaceFirst, 3),
        ({"_target_": SpaceFirst, "width": 4}, 4),
        (lambda box: SpaceFirst(box, 6), 6),
        (
            {
                "_target_": "ml_pipeline.policy.recurrent.Recurrent",
                "encoder": {"_target_": SpaceFirst},
            },
            64,
        ),
    ],
)
def test_a_network_is_a_class_or_a_function_of_the_space(
    network: Any, width: int, here: Path
) -> None:
    run = train(small(), "agent.n_minibatches=1", network=network, quiet=True)

    assert run.agent.greedy().trunk.out_features == width


def test_callbacks_are_objects_and_functions_and_false_ends_the_run(here: Path) -> None:
    seen = []

    def at_two(loop: RunningLoop, metrics: dict[str, float]) -> Any:
        metrics["mine"] = 10 * loop.iteration
        return np.bool_(loop.iteration < 2)

    class Hears(Callback):
        def on_train_start(self, loop: RunningLoop) -> None:
            seen.append("start")

        def on_iteration_end(self, loop: RunningLoop, metrics: Any) -> None:
            seen.append(metrics["mine"])

    run = train(small(total_steps=640), callbacks=[at_two, Hears(), Hears()], quiet=True)

    assert seen == ["start", "start", 10, 10, 20, 20]
    assert run.env_steps == 64
    assert read_rows(run.run_dir)[-1]["mine"] == "20"
    alone = train(small(total_steps=640), callbacks=lambda loop, _: False, quiet=True)
    assert alone.env_steps == 32
    named = train(small(), callbacks={"mine": lambda loop, metrics: None}, quiet=True)
    assert named.env_steps == 64


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"env": CountingEnv()}, r"env\.target=CountingEnv: is an object; pass its class"),
        ({"env": 3}, r"env=3: pass a name, an id, a class"),
        ({"env": "Cartpole-v1"}, r"env\.id=Cartpole-v1.*did you mean CartPole-v1"),
        ({"network": nn.Linear(4, 4)}, r"network\._target_=Linear: is an object; pass its class"),
        ({"network": nn.Linear}, r"network: Linear cannot be called: missing.*'in_features'"),
        ({"callbacks": Callback}, r"callbacks\.Callback: is a class; pass an object: Callback"),
        ({"callbacks": [3]}, r"callbacks\.int=3: pass an object of an ml_pipeline Callback"),
        ({"callbacks": lambda loop: 0}, r"callbacks\.lambda: is called as lambda\(loop, metrics\)"),
        ({"callbacks": {"evaluation": Callback()}}, r"callbacks\.evaluation: the config has one"),
    ],
)
def test_what_is_no_env_network_or_callback_is_refused_before_a_folder_exists(
    settings: dict[str, Any], error: str, here: Path
) -> None:
    with pytest.raises((ConfigError, UserError), match=error):
        train(small(), quiet=True, **settings)

    assert not Path("runs").exists()
