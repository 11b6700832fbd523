"""Words of other libraries, flags and typos lead to an override that is ready to paste."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.entry import check_words
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.assembly.words import is_foreign, repeated
from ml_pipeline.config.checks import integer_steps
from ml_pipeline.errors import UserError


def suggested(*words: str) -> str:
    """What the error suggests instead of the last word."""
    with pytest.raises(ConfigError) as caught:
        checked_config(compose_config(words))
    found = re.search(r"did you mean (.*?)\?", str(caught.value))
    return found[1] if found else str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((f"{key}=3e-4", "agent.learning_rate=3e-4") for key in ("learning_rate", "lr")),
        ("agent.lr=3e-4", "agent.learning_rate=3e-4"),
        ("+agent.lr=3e-4", "agent.learning_rate=0.0003"),
        ("learning-rate=3e-4", "agent.learning_rate=3e-4"),
        ("ppo.learning_rate=3e-4", "agent.learning_rate=3e-4"),
        ("agent.gama=0.9", "agent.gamma=0.9"),
        ("gamma=0.9", "agent.gamma=0.9"),
        ("n_epochs=4", "agent.n_epochs=4"),  # not n_envs, which is closer
        ("agent.ent_coef=0.1", "agent.entropy_coef=0.1"),
        ("agent=sac agent.ent_coef=0.1", "agent.temperature=0.1"),
        ("agent.batch_size=64", "agent.n_minibatches=16"),  # 8 envs x 128 steps / 64
        ("batch_size=100", "agent.n_minibatches=8"),  # 128 is the nearest equal part
        ("n_envs=16 agent.n_steps=64 agent.batch_size=1", "agent.n_minibatches=1024"),
        ("agent=dqn batch_size=64", "agent.batch_size=64"),
        ("agent=dqn train_freq=4", "agent.updates_per_env_step=0.25"),
        ("clip_range_vf=0.2", "agent.clip_value_loss=true"),
        ("anneal_lr=false", "agent.learning_rate_schedule=constant"),
        ("target_kl=0.02", "agent.max_kl=0.02"),
        ("num_envs=4", "n_envs=4"),
        ("agent.seed=3", "seed=3"),
        ("Seed=3", "seed=3"),
        ("total_timesteps=1e6", "total_steps=1e6"),
        ("env_id=Acrobot-v1", "env.id=Acrobot-v1"),
        ("env.name=Acrobot-v1", "env.id=Acrobot-v1"),
        ("hidden_size=128", "network.hidden_sizes=[128,128]"),
        ("policy=MlpPolicy", "network=mlp"),
        ("vec_env.workers=2", "vec_env.n_workers=2"),
        ("callbacks.evaluation.every_steps=9", "callbacks.evaluation.eval_every_steps=9"),
        ("callbacks.checkpoints.save_freq=9", "callbacks.checkpoints.every_steps=9"),
        ("wandb.project=mine", "logger.wandb.project=mine"),
        ("log_dir=/tmp/runs", "run_root=/tmp/runs"),
        ("env=FrozenLake-v1", "env.id=FrozenLake-v1"),
        ("env=ALE/Freeway-v5", "env.id=ALE/Freeway-v5"),
        ("env=ale_py:ALE/Freeway-v5", "env.id=ale_py:ALE/Freeway-v5"),
        ("env=FrozenLake", "env.id=FrozenLake-v1"),
        ("env=HalfCheetah", "env=half_cheetah"),
        ("env=cartpol", "env=cartpole"),
        ("env=my_module.MyEnv", "env.target=my_module.MyEnv"),
        ("network=my_module.Net", "network=own network._target_=my_module.Net"),
        ("agent=my_module.ALGORITHM", "agent.algorithm=my_module.ALGORITHM"),
        ("agent=PPO", "agent=ppo"),
        ("vec_env=subproc", "vec_env=parallel"),
        ("logger=[wandb,tb]", "logger=tensorboard"),
        ("experiment=CartPole-v1", "experiment=cartpole"),
        ("rollout_fragment_length=200", "agent.n_steps=200"),
        ("train_batch_size=4000", "agent.n_steps=500"),  # of 8 envs
        ("tensorboard_log=./logs", "logger=tensorboard"),
        ("callbacks.eval.freq=9", "callbacks.evaluation.eval_every_steps=9"),
        ("callbacks.checkpoint.freq=9", "callbacks.checkpoints.every_steps=9"),
        ("env=babyai", "env.id=BabyAI-GoToObj-v0"),
        ("env=LunarLander-v2", "env.id=LunarLander-v3"),  # v2 is no longer registered
        ("env=CartPole-v9", "env.id=CartPole-v1"),
        ("env=CartPole-v0", "env.id=CartPole-v0"),
    ],
)
def test_word_of_another_library_leads_to_the_key(typed: str, meant: str) -> None:
    assert suggested(*typed.split()) == meant


@pytest.mark.parametrize(
    "word",
    [
        "verbose=1",
        "agent.verbose=1",
        "save_model=true",
        "optimizer=adam",
        "log_interval=10",
        "torch_deterministic=true",
    ],
)
def test_word_that_a_run_does_not_need_is_named(word: str) -> None:
    assert suggested(word).endswith(" without this word; leave it out")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("callbacks.early_stop.patience=3", "callbacks=early_stopping callbacks.early_stopping."),
        ("callbacks.earlystopping.patienc=3", "callbacks=early_stopping callbacks.early_stopping."),
        ("callbacks.video.every_steps=9", "callbacks=video callbacks.video.every_steps=9"),
        ("logger.mlflow.experiment=x", "logger=mlflow logger.mlflow.experiment=x"),
        ("opponent.capacity=9", "opponent=self_play opponent.capacity=9"),
    ],
)
def test_key_of_an_option_that_is_off_leads_to_the_option(typed: str, fix: str) -> None:
    line = suggested(typed)

    written = line.partition("; write ")[2]
    assert written.startswith(fix)
    compose_config(written.split())  # it can be pasted


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("total_steps=1M", "total_steps=1000000"),
        ("total_steps=1.5m", "total_steps=1500000"),
        ("total_steps=1000k", "total_steps=1000000"),
        ("total_steps='10 million'", "total_steps=10000000"),
        ("total_steps='1 000 000'", "total_steps=1000000"),
        ("total_steps=1.000.000", "total_steps=1000000"),
        ("total_steps=2**20", "total_steps=1048576"),
        ("total_steps=10^6", "total_steps=1000000"),
        ("agent.n_steps=2e3", "agent.n_steps=2000"),
        ("agent.n_steps=2048.0", "agent.n_steps=2048"),
        ("n_envs=8.0", "8"),
        ("n_envs=1k", "1000"),
        ("num_episodes=1k", "num_episodes=1000"),
        ("agent.max_kl=None", "agent.max_kl=null"),
        ("agent.learning_rate=lin_3e-4", "agent.learning_rate=3e-4 agent.learning_rate_schedule="),
        ("seed=1..5", "-m seed=1,2,3,4,5"),
        ("seed=1-5", "-m seed=1,2,3,4,5"),
        ("seed=0:3", "-m seed=0,1,2,3"),
        ("seed=1..50", "-m 'seed=range(1,51)'"),
        ("seed=[1, 2, 3]", "-m seed=1,2,3"),
        ("seed=3,", "seed=3"),
        ("network.hidden_sizes=(64,64)", "'network.hidden_sizes=[64,64]'"),
    ],
)
def test_value_that_is_almost_right_leads_to_the_right_one(typed: str, fix: str) -> None:
    assert suggested(typed).partition("write ")[2].startswith(fix)


@pytest.mark.parametrize(
    ("value", "end"), [("10k", "1; write 10000"), ("many", "at least 1"), ("0", "1"), ("0,5", "1")]
)
def test_steps_of_a_callback_are_answered_in_the_same_way(value: str, end: str) -> None:
    with pytest.raises(ValueError, match=f"^every_steps={value}: must be an integer of .*{end}$"):
        integer_steps("every_steps", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "steps"), [("1e6", 1e6), ("1_000_000", 1e6), ("1000000", 1e6), ("5.0", 5)]
)
def test_number_with_one_meaning_is_accepted(value: str, steps: float) -> None:
    assert checked_config(compose_config([f"total_steps={value}"])).total_steps == steps


@pytest.mark.parametrize(
    "word", ["agent.gamma=high", "seed=5..1", "seed=one", "agent.gamma=1.5x", "total_steps=1e400"]
)
def test_value_without_a_clear_meaning_gets_no_other_one(word: str) -> None:
    assert "write" not in suggested(word)


@pytest.mark.parametrize(
    "words",
    [
        "env.id=Acrobot-v1 env=pendulum",
        "env.target=my_module.MyEnv seed=1 env=hockey",
        "network._target_=my_module.Net network=lstm",
        "agent.algorithm=my_module.ALGORITHM agent=dqn",
    ],
)
def test_choice_of_two_things_in_one_command_is_refused(words: str) -> None:
    key, *_, group = words.split()

    with pytest.raises(
        UserError, match=f"{key} {group}: both choose the .*, or write {group} {key}"
    ):
        compose_config(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "env=atari env.id=ALE/Freeway-v5",
        "network._target_=my_module.Net network=own",
        "env.kwargs={} env=pendulum",
        "experiment=acrobot env=pendulum",
    ],
)
def test_key_that_changes_the_choice_is_accepted(words: str) -> None:
    compose_config(words.split())


def test_key_with_several_values_is_named() -> None:
    lines = list(repeated(["seed=1", "seed=2", "seed=3", "n_envs=4", "seed=9"]))

    assert lines == ["seed=3: the last value counts; for a sweep, write -m seed=1,2,3"]


def test_word_without_a_likely_meaning_gets_the_choices() -> None:
    assert suggested("agent=a2c").endswith("no such option; choose from dqn, ppo, pqn, sac, td3")
    assert "choose from algorithm, action_mask" in suggested("agent.entirely_unknown=1")
    assert suggested("env.kwargs.size=3").endswith("to add a key, write +env.kwargs.size=3")


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("agent.gamma", "a number"),
        ("agent.n_steps", "an integer"),
        ("seed", "an integer"),
        ("total_steps", "a number"),
        ("agent.fast", "a text"),
        ("trust", "true or false"),
        ("n_envs", "auto, or at least 1"),
        ("env.wrappers", "a mapping; for none, {}"),
    ],
)
def test_null_is_refused_in_the_words_of_the_config(key: str, rule: str) -> None:
    assert suggested(f"{key}=null") == f"{key}=null: must be {rule}"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (
            "env.wrappers=[my.Wrapper]",
            "env.wrappers: must map names to values; write "
            "+env.wrappers.my_name._target_=my_module.MyWrapper",
        ),
        (
            "env.kwargs=3",
            "env.kwargs=3: must map names to values; write +env.kwargs.my_name=3",
        ),
        ("network=own", "network._target_: must be set; write network._target_=my_module.MyClass"),
        ("network={a: 1}", "network={a: 1}: unknown key; choose from "),
        ("n_envs==8", "n_envs==8: write n_envs=8"),
        (
            "env.gravity=3",
            "env.gravity=3: unknown key; an argument of the env is +env.kwargs.gravity=3",
        ),
    ],
)
def test_value_of_the_wrong_form_is_answered_with_the_right_form(word: str, line: str) -> None:
    assert suggested(word).startswith(line)


@pytest.mark.parametrize("group", ["callbacks", "logger", "env", "network", "agent", "vec_env"])
def test_null_for_a_group_names_the_group(group: str) -> None:
    assert suggested(f"{group}=null").startswith(f"{group}=null: name ")


def test_null_removes_a_callback_a_logger_and_a_wrapper() -> None:
    words = ["callbacks.evaluation=null", "logger.wandb=null", "+env.wrappers.a=null"]

    config = checked_config(compose_config(words))

    assert "evaluation" not in config.callbacks
    assert "checkpoints" in config.callbacks
    assert (config.logger, config.env.wrappers) == ({}, {})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "agent: {gamma: 0.9}",
            "sets keys outside of experiment; begin it with # @package _global_",
        ),
        ("agent: [", " is not valid YAML: line 1: "),
    ],
)
def test_broken_experiment_file_is_named_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(text)

    message = suggested("experiment=mine")

    assert "conf/experiment/mine.yaml" in message
    assert line in message


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--seed=3", "seed=3"),
        ("--seed 3", "seed=3"),
        ("seed 3", "seed=3"),
        ("seed = 3", "seed=3"),
        ("cartpole", "env=cartpole"),
        ("CartPole-v1 -lr 1e-3", "env.id=CartPole-v1 agent.learning_rate=1e-3"),
        (
            "--n-envs 8 --parallel-start-method spawn --num-episodes 1000 --learning-rate 3e-4 "
            "--checkpoint-dir DIR",
            "n_envs=8 vec_env.start_method=spawn num_episodes=1000 agent.learning_rate=3e-4 "
            "run_root=DIR",
        ),
        ("--env CartPole-v1 --no-cuda", "env.id=CartPole-v1 device=cpu"),
        ("--env acrobot n_envs=2", "env=acrobot n_envs=2"),
        ("--batch-size 64 --num-envs 16", "agent.n_minibatches=32 n_envs=16"),
        ("--agent dqn --batch-size 64", "agent=dqn agent.batch_size=64"),
        ("--total-timesteps 1e6 --config-dir c", "total_steps=1e6 --config-dir c"),
        ("--tags [a,b]", "'tags=[a,b]'"),
        ("agent.gamma: 0.9", "agent.gamma=0.9"),
        ("agent.gamma:0.9", "agent.gamma=0.9"),
        ("agent.gamma : 0.9", "agent.gamma=0.9"),
        ("--agent.gamma: 0.9", "agent.gamma=0.9"),
        ("{agent.gamma: 0.9}", "agent.gamma=0.9"),
        ("gamma: 0.9 env.id: CartPole-v1", "agent.gamma=0.9 env.id=CartPole-v1"),
        ("env: cartpole", "env=cartpole"),
        ("my_module:MyEnv-v0", "env.id=my_module:MyEnv-v0"),
        ("seed= 3", "seed=3"),
        ("network.hidden_sizes=[64, 64] seed=3", "'network.hidden_sizes=[64,64]' seed=3"),
        ("network.hidden_sizes=[64 64]", "'network.hidden_sizes=[64,64]'"),
        ("-m seed=1 2 3", "-m seed=1,2,3"),
        ("--resume", "resume=latest"),
        ("resume n_envs=2", "resume=latest n_envs=2"),
        ("--track --capture-video --cuda False", "logger=wandb callbacks=video device=cpu"),
        ("--config conf/experiment/cartpole.yaml", "experiment=cartpole"),
    ],
)
def test_flags_are_answered_with_the_command_to_type(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=": settings are key=value; write: ") as caught:
        check_words(["train_ppo.py", *typed.split()])

    command = str(caught.value).partition("write: ")[2]
    assert command.endswith(f" train {answer}")
    check_words(["train_ppo.py", *shlex.split(answer)])  # nothing is left to say


@pytest.mark.parametrize(
    ("typed", "fact", "answer"),
    [
        ("--save-model", "--save-model: a run saves its checkpoints without this word", ""),
        ("--save-model True --seed 3", "a run saves its checkpoints without this word", " seed=3"),
        ("--torch-deterministic False", "the same seed repeats a run without this word", ""),
        ("--no-torch-deterministic", "the same seed repeats a run without this word", ""),
        ("--render n_envs=2", "`evaluate RUN --render human` shows the policy", " n_envs=2"),
    ],
)
def test_flag_that_a_run_does_not_need_is_left_out(typed: str, fact: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{fact}; leave it out")) as caught:
        check_words(["train_ppo.py", *typed.split()])

    assert str(caught.value).endswith(f" train{answer}")


def test_flag_without_a_key_is_named() -> None:
    with pytest.raises(
        ConfigError, match="no setting is like --qwerty, --help lists them; write: "
    ):
        check_words(["train_ppo.py", "--qwerty", "9", "--seed", "3"])


@pytest.mark.parametrize(
    "words",
    ["--cfg job", "-c job --resolve", "--help", "-m seed=1,2", "--multirun seed=1,2", "--info all"],
)
def test_words_of_hydra_are_accepted(words: str) -> None:
    assert not any(is_foreign(word) for word in words.split())
    check_words(["train_ppo.py", *words.split(), "~callbacks.evaluation", "+env.kwargs.size=3"])
