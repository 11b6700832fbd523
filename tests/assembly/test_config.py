"""The composed config: defaults, ranges and types of keys, and every preset."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from omegaconf import DictConfig, OmegaConf

from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.pqn.agent import PQNConfig
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.td3.agent import TD3Config
from ml_pipeline.assembly.compose import ConfigError, checked_config, compose_config
from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.targets import TargetError

OWN_PPO = """
from dataclasses import dataclass, field
from ml_pipeline.algorithms.ppo.algorithm import PPO
from ml_pipeline.algorithms.ppo.config import PPOConfig

@dataclass
class PatientConfig(PPOConfig):
    patience: int = 1

PATIENT = PPO._replace(config=PatientConfig)
"""
TWO_CLASSES = """
from dataclasses import dataclass
from ml_pipeline.algorithms.ppo.algorithm import PPO
from ml_pipeline.algorithms.ppo.config import PPOConfig

@dataclass
class Early(PPOConfig):
    algorithm: str = "pair.algorithm.PAIR"

@dataclass
class Later(Early):
    patience: int = 1

"""


def config(*overrides: str) -> TrainConfig:
    return checked_config(compose_config(overrides))


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """The default config; Hydra takes a while to compose one."""
    return compose_config([])


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_defaults_of_the_yaml_equal_the_defaults_of_the_dataclasses() -> None:
    default = TrainConfig(agent=PPOConfig())

    composed = dataclasses.replace(config(), network={}, callbacks={}, logger={})

    assert composed == default


@pytest.mark.parametrize(
    ("overrides", "env_steps"),
    [
        *((f"total_steps={text} agent.n_steps=125", 100_000) for text in ("100_000", "1e5")),
        ("total_steps=100000", 97 * 128 * 8),  # whole rollouts
        ("total_steps=1", 128 * 8),  # but at least one
        ("num_episodes=3 n_envs=4 agent.n_steps=32", 3 * 4 * 32),
    ],
)
def test_run_has_whole_rollouts_up_to_total_steps_or_num_episodes_of_them(
    overrides: str, env_steps: int
) -> None:
    assert config("agent.n_minibatches=1", *overrides.split()).wanted_steps == env_steps


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agent.gamma=1.5", "agent.gamma=.*: must be between 0 and 1"),
        ("agent.learning_rate=0", "agent.learning_rate=.*: must be positive"),
        ("agent.learning_rate=inf", "agent.learning_rate=.*: must be finite"),
        ("agent.n_epochs=0", "agent.n_epochs=.*: must be at least 1"),
        ("agent.clip_range=-1", "agent.clip_range=.*: must be positive"),
        ("agent.entropy_coef=-1", "agent.entropy_coef=.*: must be at least 0"),
        ("agent.value_coef=-1", "agent.value_coef=.*: must be at least 0"),
        ("agent.max_grad_norm=0", "agent.max_grad_norm=.*: must be positive"),
        ("agent.gae_lambda=2", "agent.gae_lambda=.*: must be between 0 and 1"),
        ("n_envs=0", "n_envs=.*: must be auto, or at least 1"),
        ("seed=-1", "seed=-1: must be between 0 and"),
        ("total_steps=0", "total_steps=.*: must be .* at least 1"),
        ("total_steps=10.5", "total_steps=.*: must be .* at least 1"),
        ("num_episodes=0", "num_episodes=.*: must be at least 1"),
        ("device=tpu", r"device=.*: must be auto \| cpu \| cuda \| cuda:N \| mps"),
        ("device=cuda:x", "device=cuda:x: must be"),
        ("compile=fast", r"compile=.*: must be auto \| off \| graph"),
        ("compile=true", r"compile=.*: must be auto \| off \| graph"),
        ("precision=half", r"precision=.*: must be float32 \| tf32 \| bf16"),
        ("n_envs=many", "n_envs=.*: must be auto, or at least 1"),
        ("cpu_threads=0", "cpu_threads=0: must be auto, or at least 1"),
        ("n_envs=1.5", "n_envs=.*: must be auto, or at least 1"),
        ("vec_env.infos=some", r"vec_env.infos=.*: must be all \| final"),
        ("vec_env.on_worker_death=weep", r"vec_env.on_worker_death=weep: must be raise \| restart"),
        ("vec_env.max_restarts=-1", "vec_env.max_restarts=.*: must be at least 0"),
        ("vec_env.mode=fast", r"vec_env.mode=.*: must be auto \| serial \| parallel \| shared"),
        ("vec_env.n_workers=0", "vec_env.n_workers=.*: must be at least 1"),
        ("vec_env.start_method=loky", "vec_env.start_method=.*: must be spawn"),
        ("vec_env.step_timeout_seconds=0", "vec_env.step_timeout_seconds=.*: must be positive"),
        ("env.id=null", "env.id and env.target are both empty"),
        (
            "agent.n_minibatches=7",
            "agent.n_minibatches=7: agent.n_steps=128 x n_envs=8 = 1024 transitions do not divide",
        ),
    ],
)
def test_value_out_of_range_is_refused_with_its_full_key(
    composed: DictConfig, override: str, words: str
) -> None:
    changed = OmegaConf.merge(composed, OmegaConf.from_dotlist([override]))

    with pytest.raises(ConfigError, match=words):
        checked_config(changed)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("device=cuda:1", "cuda:1"),
        *((f"compile={text}", "off") for text in ("off", "'off'", "false")),  # YAML: off is false
    ],
)
def test_device_with_an_index_and_compile_off_are_accepted(override: str, value: str) -> None:
    assert getattr(config(override), override.partition("=")[0]) == value


def test_env_accepts_new_arguments_and_wrappers() -> None:
    composed = config(
        "env.id=Pendulum-v1",
        "+env.kwargs.g=9.81",
        "+env.wrappers.clip={_target_: gymnasium.wrappers.ClipReward, min_reward: -1}",
    )

    assert composed.env.kwargs == {"g": 9.81}
    assert composed.env.wrappers["clip"]["min_reward"] == -1


def test_several_loggers_or_none_can_be_chosen() -> None:
    assert list(config("logger=[wandb,none]").logger) == ["wandb"]
    assert config("logger=none").logger == {}
    assert config("logger=[]").logger == {}


@pytest.mark.parametrize(
    ("agent", "config_class"),
    [
        *(("ppo", PPOConfig), ("dqn", DQNConfig), ("sac", SACConfig)),
        *(("td3", TD3Config), ("pqn", PQNConfig)),
    ],
)
def test_composed_agent_has_every_key_and_default_of_its_class(
    agent: str, config_class: type[AgentConfig]
) -> None:
    composed = compose_config([f"agent={agent}"]).agent

    assert list(composed) == [each.name for each in dataclasses.fields(config_class)]
    assert composed == dataclasses.asdict(config_class())


def test_composing_does_not_import_torch() -> None:
    code = (
        "import sys; from ml_pipeline.assembly.compose import compose_config\n"
        "for each in ('ppo', 'dqn', 'sac'): compose_config([f'agent={each}', 'agent.gamma=0.9'])\n"
        "print('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"


def test_file_of_an_agent_keeps_the_values_of_the_file_that_it_extends(here: Path) -> None:
    algorithm = f"algorithm: {PPOConfig.algorithm}\n"
    write("conf/agent/base.yaml", f"{algorithm}learning_rate: 5e-4\n")
    write("conf/agent/mine.yaml", f"defaults: [base]\n{algorithm}gamma: 0.9\n")

    agent = config("agent=mine", "agent.n_steps=64").agent

    assert agent == PPOConfig(learning_rate=5e-4, gamma=0.9, n_steps=64)


def test_keys_of_an_algorithm_that_the_command_line_names_are_accepted(here: Path) -> None:
    write("own_ppo.py", OWN_PPO)

    agent = config("agent.algorithm=own_ppo.PATIENT", "agent.patience=3", "agent.gamma=0.9").agent

    assert (type(agent).__name__, agent.patience, agent.gamma) == ("PatientConfig", 3, 0.9)
    with pytest.raises(ConfigError, match=r"patients=3: unknown key; did you mean agent\.patience"):
        config("agent.algorithm=own_ppo.PATIENT", "agent.patients=3")


def test_field_without_a_default_is_asked_for_by_name(here: Path) -> None:
    write("asking_ppo.py", OWN_PPO.replace("int = 1", "int = field(kw_only=True)"))
    write("conf/agent/patient.yaml", "algorithm: asking_ppo.PATIENT\n")

    assert config("agent=patient", "agent.patience=2").agent.patience == 2
    with pytest.raises(
        ConfigError, match=r"agent\.patience: must be set; write agent\.patience=VALUE"
    ):
        config("agent=patient")


def test_algorithm_decides_between_two_classes_that_name_it(here: Path) -> None:
    write("pair/__init__.py", "")
    write("pair/config.py", TWO_CLASSES)
    write("pair/algorithm.py", TWO_CLASSES + "PAIR = PPO._replace(config=Later)\n")
    write("conf/agent/pair.yaml", "algorithm: pair.algorithm.PAIR\n")

    assert config("agent=pair", "agent.patience=4").agent.patience == 4


def test_config_py_of_the_current_folder_is_not_imported(here: Path) -> None:
    write("config.py", "raise SystemExit('imported')")
    write("lonely_ppo.py", OWN_PPO)
    write("conf/agent/lonely.yaml", "algorithm: lonely_ppo.PATIENT\n")

    assert config("agent=lonely").agent.patience == 1


def test_unknown_class_that_a_file_extends_is_named(here: Path) -> None:
    write("conf/data/mine.yaml", "defaults: ['/class/nope.Settings@_here_']\n")

    with pytest.raises(TargetError, match=r"class=nope\.Settings: no module named 'nope'"):
        config("data=mine")


def test_command_line_overrides_an_experiment() -> None:
    composed = config("experiment=cartpole", "agent.n_epochs=3")

    assert (composed.agent.n_steps, composed.agent.n_epochs) == (32, 3)


@pytest.mark.slow
def test_every_preset_composes_and_shows_a_command_in_its_first_line() -> None:
    folders = [REPOSITORY / "conf", *REPOSITORY.glob("ml_pipeline/worlds/*/conf")]
    files = [(folder, file) for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    assert len(files) > 15
    for folder, file in files:
        lines = [line for line in file.read_text().splitlines() if "@package" not in line]
        group, option = file.relative_to(folder).parent, file.stem
        if str(group) == "study":  # search spaces, not a Hydra group
            assert "python -m ml_pipeline study start" in lines[0], file
            continue
        assert re.search(r"python train_(ppo|dqn|sac)\.py", lines[0]), file
        if str(group) != ".":
            own = ["network._target_=my_module.Mine"] if option == "own" else []
            config(f"{group}={option}", *own)
