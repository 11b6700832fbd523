"""The words that users of other libraries type, and the words of this config that replace them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import yaml
from hydra._internal.utils import get_args_parser

from ml_pipeline.config.checks import number_meant
from ml_pipeline.errors import UserError
from ml_pipeline.shelves import preset_files

# By key: the names that it has elsewhere. The first key that the config has counts.
_NAMES = {
    "agent.learning_rate": "lr step_size actor_lr critic_lr policy_lr",
    "agent.learning_rate_schedule": "lr_schedule schedule lr_scheduler",
    "agent.gamma": "discount discount_factor",
    "agent.gae_lambda": "lam lambda lmbda lambda_ gae",
    "agent.n_steps": (
        "num_steps rollout_steps rollout_length nsteps rollout_fragment_length train_batch_size"
    ),
    "agent.n_step": "n_steps n_step_returns multi_step",
    "agent.n_epochs": "epochs num_epochs update_epochs ppo_epochs k_epochs num_sgd_iter",
    "agent.batch_size": "minibatch_size mini_batch_size sgd_minibatch_size",
    "agent.n_minibatches": (
        "num_minibatches minibatches num_mini_batch "
        "batch_size minibatch_size mini_batch_size sgd_minibatch_size"
    ),
    "agent.clip_range": "clip clip_coef clip_param clip_eps eps_clip epsilon_clip clip_epsilon",
    "agent.clip_value_loss": "clip_vloss clip_range_vf vf_clip_param",
    "agent.entropy_coef": "ent_coef entropy entropy_coeff entropy_coefficient",
    "agent.temperature": "ent_coef alpha entropy_coef entropy",
    "agent.value_coef": "vf_coef vf_coeff value_loss_coef vf_loss_coeff value_coefficient",
    "agent.max_grad_norm": "grad_clip max_grad clip_grad grad_norm gradient_clip",
    "agent.max_kl": "target_kl kl_target",  # where an iteration stops, in other libraries
    "agent.normalize_advantage": "norm_adv normalize_advantages",
    "agent.normalize_obs": "norm_obs normalise_obs normalize_observations",
    "agent.scale_reward": "norm_reward normalize_reward reward_scaling normalize_rewards",
    "agent.gsde_every_steps": "sde_sample_freq sde_freq",
    "agent.buffer_size": "replay_size memory_size replay_buffer_size buffer",
    "agent.learning_starts": "start_steps warmup_steps warmup start_timesteps random_steps",
    "agent.tau": "polyak target_tau soft_update",
    "agent.updates_per_env_step": "gradient_steps utd utd_ratio train_freq train_frequency",
    "agent.target_every": "target_update_interval target_network_frequency target_update_freq",
    "agent.epsilon_share": "exploration_fraction epsilon_decay",
    "agent.epsilon_end": "exploration_final_eps end_e epsilon_min eps_end final_epsilon",
    "agent.epsilon_start": "exploration_initial_eps start_e epsilon eps_start",
    "agent.policy_delay": "policy_frequency policy_freq",
    "n_envs": "num_envs nenvs n_environments envs num_env num_environments",
    "total_steps": "timesteps total_timesteps max_steps num_timesteps steps env_steps n_timesteps",
    "num_episodes": "episodes n_episodes iterations n_iterations num_iterations",
    "seed": "random_seed rng_seed",
    "env.id": "env name env_id env_name gym_id environment task game",
    "env.kwargs": "env_kwargs env_args env_config",
    "env.wrappers": "env_wrappers",
    "vec_env.n_workers": "workers num_workers n_cpu num_cpus n_procs num_processes",
    "vec_env.start_method": "parallel_start_method mp_context multiprocessing_context",
    "cpu_threads": "threads num_threads n_threads torch_threads",
    "network.hidden_sizes": "net_arch hidden_size hidden_dim hidden hidden_layers layers",
    "network.size": "hidden_size lstm_size lstm_hidden_size hidden_dim",
    "network.activation": "activation_fn act activation_function",
    "callbacks.evaluation.eval_every_steps": (
        "eval_freq eval_every eval_interval evaluate_every freq every interval"
    ),
    "callbacks.evaluation.n_episodes": "eval_episodes n_eval_episodes num_eval_episodes",
    "callbacks.checkpoints.every_steps": (
        "save_freq save_every checkpoint_every checkpoint_interval save_interval checkpoint_freq "
        "freq every interval"
    ),
    "run_root": (
        "checkpoint_dir log_dir logdir save_dir output_dir out_dir save_path runs_dir results_dir"
    ),
    "logger.wandb.project": "wandb_project wandb_project_name project project_name",
    "logger.wandb.entity": "wandb_entity entity",
    "logger.wandb.mode": "wandb_mode",
    "name": "exp_name run_name experiment_name",
    "resume": "checkpoint load resume_from restore load_path",
    "init_from": "pretrained init_weights weights load_weights",
    "experiment": "config preset",
    "agent": "algo algorithm",
    "network": "policy model",
}
# The words of a switch, and what to write if it is on or off.
_SWITCHES = (
    ("anneal_lr", "agent.learning_rate_schedule=linear", "agent.learning_rate_schedule=constant"),
    ("use_sde sde", "agent.box_policy=gsde", None),
    ("clip_range_vf vf_clip_param", "agent.clip_value_loss=true", "agent.clip_value_loss=false"),
    ("cuda gpu use_cuda use_gpu", "device=cuda", "device=cpu"),
    ("cpu", "device=cpu", "device=auto"),
    ("mps", "device=mps", "device=auto"),
    ("track wandb use_wandb", "logger=wandb", "logger=none"),
    ("tensorboard tensorboard_log use_tensorboard", "logger=tensorboard", "logger=none"),
    ("capture_video record_video video", "callbacks=video", "callbacks=default"),
    ("parallel", "vec_env=parallel", "vec_env=serial"),
    ("lstm recurrent use_lstm", "network=lstm", "network=mlp"),
    ("cnn", "network=cnn", "network=mlp"),
)
# By what to write: a group, and options of other libraries.
_OPTIONS = {
    "vec_env=serial": ("vec_env", "dummy sync dummyvecenv syncvectorenv"),
    "vec_env=parallel": ("vec_env", "subproc async subprocvecenv asyncvectorenv multiprocessing"),
    "logger=none": ("logger", "csv off false no disabled local"),
    "logger=tensorboard": ("logger", "tb board"),
    "logger=wandb": ("logger", "wb true"),
    "network=mlp": ("network", "mlppolicy dense fc"),
    "network=cnn": ("network", "cnnpolicy conv nature naturecnn atari"),
    "network=dict": ("network", "multiinputpolicy multi combined"),
    "network=lstm": ("network", "rnn recurrent mlplstmpolicy"),
    "network=lstm network.cell=gru": ("network", "gru"),
    "network=lstm network.cell=mingru": ("network", "mingru min_gru"),
    "network=trxl": ("network", "transformer attention gtrxl transformerxl attention_net"),
    "agent=ppo": ("agent", "ppo2 recurrentppo maskableppo"),
    "agent=dqn": ("agent", "ddqn doubledqn"),
    "agent=dqn agent.n_quantiles=50": ("agent", "qrdqn"),
    "agent=td3": ("agent", "ddpg"),
    "callbacks=default": ("callbacks", "evaluation eval checkpoint checkpoints"),
    "callbacks=[]": ("callbacks", "none off false"),
    "env.id=BabyAI-GoToObj-v0": ("env", "babyai"),
}
# Words without a key: what a run does instead, or the command for it.
_NEEDLESS = {
    "verbose progress_bar": "a run shows its progress without this word",
    "save_model save_replay_buffer": "a run saves its checkpoints without this word",
    "monitor": "a run records its episodes without this word",
    "log_interval log_freq": "a run logs every iteration without this word",
    "optimizer optimiser": "agents learn with Adam without this word",
    "torch_deterministic cudnn_deterministic": "the same seed repeats a run without this word",
    "upload_model hf_entity push_to_hub": "a run uploads no model; `export RUN` makes one file",
    "render render_mode": "`evaluate RUN --render human` shows the policy",
    "eval evaluate": "a run evaluates its policy, and `evaluate RUN` does so later",
}
_BY_NAME = ("callbacks", "logger")  # groups whose keys are names, which options bring
# By group: its keys that choose the thing itself.
_CHOOSES = {"env": ("id", "target"), "network": ("_target_",), "agent": ("algorithm",)}
_MOST_LISTED = 10  # values of a sweep; more are a range
_OFF = ("false", "0", "no", "off", "none", "null")
# By group: the key that takes a dotted path instead.
_PATHS = {
    "env": "env.target",
    "agent": "agent.algorithm",
    "network": "network=own network._target_",
    "callbacks": "+callbacks.mine._target_",
    "logger": "+logger.mine._target_",
}
_GUESS = 0.75  # how similar a word must be to a key in another part of the config


def meant(key: str, value: str, config: Mapping[str, object]) -> str | None:
    """The override to write instead of ``key=value``, which ``config`` does not have, or None."""
    parent, _, name = _plain(key).rpartition(".")
    paths = list(_paths(config))
    siblings = [path for path in paths if path.rpartition(".")[0] == parent]
    if not siblings and (inner := _close_parent(parent, paths)):
        siblings, parent = [path for path in paths if path.rpartition(".")[0] == inner], inner
    near = _close(name, siblings)
    if parent not in ("", "agent") and siblings:
        known = _from_another_library(name, value, siblings, config)
        return known or (f"{near}={value}" if near else None)
    if known := _from_another_library(name, value, paths, config):
        return known
    # Before the closest sibling: that of n_epochs is n_envs.
    same_name = [path for path in paths if path.rpartition(".")[2] == name]
    found = next(iter(same_name), None) or near or _close(name, paths, cutoff=_GUESS)
    return f"{found}={value}" if found else None


def needless(key: str) -> str | None:
    """What a run does without this word of another library; None for every other word."""
    name = _plain(key).rpartition(".")[2].removeprefix("no_")
    does = next((does for names, does in _NEEDLESS.items() if name in names.split()), None)
    return f"{does}; leave it out" if does else None


def option_meant(group: str, option: str, options: Sequence[str]) -> str | None:
    """The override to write instead of ``group=option``, or None."""
    by_letters = {_letters(each): each for each in options}
    if same := by_letters.get(_letters(option)):
        return f"{group}={same}"
    for override, (its_group, names) in _OPTIONS.items():
        if group == its_group and _letters(option) in names.split():
            return override
    if group == "env" and (key := env_key(option)):
        return key
    if _is_dotted(option) and group in _PATHS:
        return f"{_PATHS[group]}={option}"
    bare = re.sub(r"-v\d+$", "", option.rpartition("/")[2]).removesuffix(".yaml")
    if near := _close(_letters(bare), list(by_letters), cutoff=0.7):
        return f"{group}={by_letters[near]}"
    return _registered(option) if group == "env" else None


def option_with(key: str, value: str, config: Mapping[str, object]) -> str | None:
    """The override of a key below an option that ``config`` does not have, with that option.

    ``callbacks.early_stop.patience=3``: ``callbacks=early_stopping
    callbacks.early_stopping.patience=3``.
    """
    group, _, inner = key.lstrip("+").partition(".")
    name, _, rest = inner.partition(".")
    files = preset_files(group)
    present = config.get(group)
    names = present if isinstance(present, Mapping) else {}
    if present is None and len(files) == 1:
        return f"{group}={next(iter(files))} {group}.{inner}={value}"
    known = {
        part: (option, settings)
        for option, file in files.items()
        for part, settings in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).items()
        if isinstance(settings, Mapping) and part not in names
    }
    if group not in _BY_NAME or not (near := _close(name, list(known), cutoff=_GUESS)):
        return None
    option, settings = known[near]
    rest = _close(rest, list(settings)) or rest
    return f"{group}={option} {group}.{near}" + (f".{rest}={value}" if rest else f"={value}")


def value_meant(key: str, value: str) -> str | None:
    """The words to write instead of ``key=value``, whose value should be a number; or None."""
    if several := _several(value):
        return f"-m {shlex.quote(f'{key}={several}') if '(' in several else f'{key}={several}'}"
    if (number := number_meant(value)) is not None:
        return f"{key}={number}"
    if value in ("None", "none", "nil"):
        return f"{key}=null"
    rate = re.fullmatch(r"(?:lin|linear)[_(]?([\d.e-]+)\)?", value)
    if rate and key.endswith("learning_rate"):
        return f"{key}={rate[1]} {key}_schedule=linear"
    return None


def _several(text: str) -> str | None:
    """1..5, 1-5, 1:5 and [1, 2, 3] as the values of a sweep; None for another text."""
    bounds = re.fullmatch(r"(\d{1,9})(?:\.{2,3}|-|:)(\d{1,9})", text)
    if bounds and int(bounds[1]) < int(bounds[2]):
        first, last = int(bounds[1]), int(bounds[2])
        if last - first < _MOST_LISTED:
            return ",".join(map(str, range(first, last + 1)))
        return f"range({first},{last + 1})"
    if listed := re.fullmatch(r"\[([\d., ]+)\]", text):
        return listed[1].replace(" ", "")
    return None


def env_key(option: str) -> str | None:
    """The override for an env that is a registered id or a dotted path; None for another word."""
    if re.search(r"-v\d+$", option) or re.fullmatch(r"\w+[/:][\w:/-]+", option):
        return f"env.id={_known_version(option)}"
    return f"{_PATHS['env']}={option}" if _is_dotted(option) else None


def _known_version(env_id: str) -> str:
    """The newest version of an env whose version Gymnasium does not have; else the id itself."""
    import gymnasium as gym

    name = env_id.rpartition("-v")[0]
    known = [each for each, spec in gym.registry.items() if each == f"{name}-v{spec.version}"]
    return env_id if env_id in gym.registry or not known else known[-1]


def _is_dotted(path: str) -> bool:
    is_file = path.endswith((".yaml", ".yml", ".py", ".pt", ".zip"))
    return not is_file and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path) is not None


def _registered(option: str) -> str | None:
    """An id of Gymnasium without its version, or one that is close to it."""
    import gymnasium as gym

    ids = {_letters(spec.name): env_id for env_id, spec in gym.registry.items()}  # the last version
    near = _close(_letters(option), list(ids), cutoff=_GUESS)
    return f"env.id={ids[near]}" if near else None


class Translation(NamedTuple):
    """A command line in the words of the config."""

    arguments: list[str]  # key=value, and the flags of Hydra
    replaced: list[str]  # the words that ``arguments`` has in another form
    needless: list[str]  # the words that a run does not need, with the reason
    unknown: list[str]


def translated(
    words: Sequence[str], config: Mapping[str, object], options: Mapping[str, Sequence[str]]
) -> Translation:
    """The words with key=value for flags that Hydra does not know, for YAML and for other forms.

    ``options``: by group.
    """
    found = Translation([], [], [], [])
    left = [part for word in words for part in _parts(word, config)]
    while left:
        word = left.pop(0)
        opens_list = word.count("[") - word.count("]")
        while left and opens_list > 0:  # [64, 64] without quotes
            opens_list += left[0].count("[") - left[0].count("]")
            has_comma = word.endswith((",", "[")) or left[0].startswith((",", "]"))
            word += left.pop(0) if has_comma else f",{left.pop(0)}"
            found.replaced.append(word)
        last = found.arguments[-1] if found.arguments else ""
        is_cut = re.fullmatch(r"[\w.]+=", word) and left and re.fullmatch(r"[\w./:-]+", left[0])
        is_form = "=" in word or word[:1] in ("-", "~") or _takes_value(last)
        if not is_cut and not is_foreign(word) and is_form:
            found.arguments.append(word)
            continue
        if re.fullmatch(r"\d+", word) and re.search(r"=[\d,]+$", last):  # seed=1 2 3
            found.arguments[-1] += f",{word}"
            found.replaced.append(word)
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        is_yaml, name = name.endswith(":"), name.strip("{:")
        while left and left[0] in ("=", ":"):  # seed = 3
            left.pop(0)
        is_pair = left and not _is_flag(left[0]) and not re.match(r"[+~\w.@/]+=", left[0])
        is_key = _is_flag(word) or is_yaml or name in _paths(config)
        if is_pair and is_key and not value:
            value = left.pop(0).removeprefix("=")
            value = value.removesuffix("}") if word.startswith("{") else value
        elif not has_value:
            value = "true" if _is_flag(word) else ""
        given = word.partition("=")[0].rstrip(":")
        if name not in _paths(config) and needless(name):
            found.needless.append(f"{given}: {needless(name)}")
            continue
        override = _override(name, value, config, options) if value else _bare(name, options)
        if override is None and value == "true" and re.match("no[-_]", name):
            override = _override(name[3:], "false", config, options)
        (found.unknown if override is None else found.replaced).append(given)
        if override is not None:
            found.arguments.append(override)
    return found


def _parts(word: str, config: Mapping[str, object]) -> list[str]:
    """A pair of YAML, such as ``agent.gamma: 0.9``, in two parts; every other word as it is."""
    pair = re.fullmatch(r"-{0,2}([A-Za-z_][\w.]*):\s*([^\s=]+)", word)
    is_pair = pair is not None and (": " in word or pair[1] in _paths(config))
    return [f"{pair[1]}:", pair[2]] if pair and is_pair else [word]


def check_order(words: Sequence[str]) -> None:
    """Refuse ``env.id=X env=pendulum``, which trains X: Hydra applies keys after groups."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for group, names in _CHOOSES.items():
        for key in (f"{group}.{name}" for name in names):
            if group in keys and key in keys[: keys.index(group)]:
                first, second = words[keys.index(key)], words[keys.index(group)]
                if (group, second) == ("network", "network=own"):
                    continue  # it needs the key
                raise UserError(
                    f"{first} {second}: both choose the {group}; leave one of them out, or write "
                    f"{second} {first} to change only this key of {second}"
                )


def repeated(words: Sequence[str]) -> Iterator[str]:
    """A line for every key with several values in a row, as a shell expands seed={1..3}.

    The last one counts. Values in other places are usual: a script appends "$@".
    """
    for key, group in itertools.groupby(words, lambda word: word.partition("=")[0]):
        values = list(dict.fromkeys(word.partition("=")[2] for word in group))
        if len(values) > 1:
            sweep = pasteable([f"{key}={','.join(values)}"])
            yield f"{key}={values[-1]}: the last value counts; for a sweep, write -m {sweep}"


def with_sizes(config: Mapping[str, object], words: Sequence[str]) -> dict[str, object]:
    """The config with the size of a rollout that the command line gives it."""
    sizes = {key: int(value) for key, _, value in _split(words) if value.isdecimal()}
    changed = {**config, "n_envs": sizes.get("n_envs", config.get("n_envs"))}
    if "agent.n_steps" in sizes and isinstance(agent := config.get("agent"), Mapping):
        changed["agent"] = {**agent, "n_steps": sizes["agent.n_steps"]}
    return changed


def _split(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    return (word.partition("=") for word in words)


def _bare(word: str, options: Mapping[str, Sequence[str]]) -> str | None:
    """The override for a word without a key, such as cartpole or CartPole-v1."""
    if word == "resume":
        return "resume=latest"
    for group in ("env", "agent", "experiment"):
        if word in options.get(group, ()):
            return f"{group}={word}"
    return env_key(word)


def _takes_value(flag: str) -> bool:
    """Whether a word follows this flag of Hydra, as in --cfg job."""
    actions = get_args_parser()._actions
    return any(flag in each.option_strings and each.nargs != 0 for each in actions)


def as_settings(words: Sequence[str]) -> list[str]:
    """The words of ``wandb agent`` as Hydra reads them: it writes --key=value and --key=None."""
    if "WANDB_SWEEP_ID" not in os.environ:
        return list(words)
    return [_as_setting(word) for word in words]


def _as_setting(word: str) -> str:
    if not (word.startswith("--") and "=" in word and is_foreign(word)):
        return word
    word = word.removeprefix("--")
    return f"{word.removesuffix('None')}null" if word.endswith("=None") else word


def is_foreign(word: str) -> bool:
    """Whether a word of the command line is a flag that Hydra does not know."""
    if not _is_flag(word):
        return False
    flag = word.partition("=")[0]
    known = [each for action in get_args_parser()._actions for each in action.option_strings]
    starts = [each for each in known if flag.startswith("--") and each.startswith(flag)]
    return flag not in known and len(starts) != 1


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _override(
    key: str, value: str, config: Mapping[str, object], options: Mapping[str, Sequence[str]]
) -> str | None:
    """``key=value`` in the words of the config, quoted for Hydra; None if there is no such key."""
    key = _plain(key)
    if (key, value) == ("resume", "true"):  # a flag without a value
        value = "latest"
    if not re.fullmatch(r"[\w.:/+*@%\[\]{}, -]*", value):
        value = "'{}'".format(value.replace("'", "\\'"))
    if key in options:
        known = options[key]
        return f"{key}={value}" if value in known else option_meant(key, value, known)
    return f"{key}={value}" if key in _paths(config) else meant(key, value, config)


def pasteable(arguments: Sequence[str]) -> str:
    """The arguments as a user types them in a shell."""
    return " ".join(
        shlex.quote(each) if re.search(r"[^\w=.,:/+~@%-]", each) else each for each in arguments
    )


def _from_another_library(
    name: str, value: str, paths: Sequence[str], config: Mapping[str, object]
) -> str | None:
    for names, on, off in _SWITCHES:
        replacement = off if value.lower() in _OFF else on
        if name in names.split() and replacement and replacement.partition("=")[0] in paths:
            return replacement
    for path, names in _NAMES.items():
        if name not in names.split() or path not in (*paths, "experiment"):
            continue
        is_number = re.fullmatch(r"[1-9]\d*", value) is not None
        if path == "agent.n_minibatches" and name.endswith("_size"):
            value = _n_minibatches(int(value), config) if is_number else "8"
        elif name == "train_batch_size" and is_number:
            n_envs = config.get("n_envs")
            value = str(max(1, int(value) // n_envs)) if isinstance(n_envs, int) else value
        elif name.startswith("train_freq") and is_number:
            value = f"{1 / int(value):g}"
        elif path == "network.hidden_sizes" and is_number:
            value = f"[{value},{value}]"
        elif path == "env.id":
            return env_key(value) or f"env={value}"
        elif path in ("agent", "network"):
            return option_meant(path, value, ()) or f"{path}={value.lower()}"
        elif path == "agent.temperature" and value == "auto":
            value = "null"
        elif path == "experiment":
            value = value.rpartition("/")[2].removesuffix(".yaml")
        return f"{path}={value}"
    return None


def _n_minibatches(size: int, config: Mapping[str, object]) -> str:
    """How many equal parts of a rollout have ``size`` transitions, or about as many."""
    agent, n_envs = config.get("agent"), config.get("n_envs")
    n_steps = agent.get("n_steps") if isinstance(agent, Mapping) else None
    if not isinstance(n_envs, int) or not isinstance(n_steps, int):
        return "8"
    rollout = n_envs * n_steps
    numbers = [each for each in range(1, rollout + 1) if rollout % each == 0]
    return str(min(numbers, key=lambda number: abs(rollout / number - size)))


def _paths(config: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key; those of agent and network first, those of eval_env last."""
    order = {"agent": -2, "network": -1, "eval_env": 1}
    for key in sorted(config, key=lambda each: order.get(each, 0) if not prefix else 0):
        if prefix or key != "hydra":
            yield f"{prefix}{key}"
            value = config[key]
            if isinstance(value, Mapping):
                yield from _paths(value, f"{prefix}{key}.")


def _close(word: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The known path whose last part is the closest to ``word``."""
    names = {path.rpartition(".")[2]: path for path in reversed(known)}
    found = get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def _close_parent(parent: str, paths: Sequence[str]) -> str | None:
    """The part of the config that ``parent`` misspells or shortens, as callbacks.eval does."""
    group, has_group, name = parent.rpartition(".")
    parts = [path for path in paths if has_group and path.rpartition(".")[0] == group]
    longer = (path for path in parts if path.rpartition(".")[2].startswith(name))
    return next(longer, None) or _close(name, parts)


def _plain(key: str) -> str:
    return key.lstrip("+~").replace("-", "_").lower()


def _letters(word: str) -> str:
    return re.sub(r"[\W_]", "", word).lower()
