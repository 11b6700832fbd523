"""GameBoy with ROMs of our own: actions, observations, rewards, exact resets and snapshots."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from game_boy_roms import write_game
from gymnasium.utils.env_checker import check_env

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot, why_no_snapshot
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv, WorkerTimeoutError
from ml_pipeline.extras import MissingExtraError
from ml_pipeline.worlds.game_boy.emulator import RomError
from ml_pipeline.worlds.game_boy.env import GameBoy, GameBoyError

NONE, LEFT, RIGHT, A = range(4)  # actions of catch


def catch(folder: Path, **options: Any) -> GameBoy:
    return GameBoy(**write_game(folder, "catch"), **options)


def numbers(env: GameBoy) -> dict[str, int]:
    assert env._values is not None
    return dict(zip(env.rules.addresses, env._values, strict=True))


def everything(env: GameBoy) -> tuple[list[int], bytes]:
    """The memory that a game can write, and the screen."""
    pyboy = env._emulator.pyboy
    memory = pyboy.memory[0x8000:0xFE00] + pyboy.memory[0xFF80:0xFFFF]
    return memory, pyboy.screen.ndarray.tobytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("observation", ["screen", "memory", "both"])
def test_gymnasiums_env_checker_accepts_the_env(tmp_path: Path, observation: str) -> None:
    check_env(catch(tmp_path, observation=observation), skip_render_check=True)


def test_buttons_move_the_cursor_and_targets_are_rewarded(tmp_path: Path) -> None:
    env = catch(tmp_path)
    env.reset()
    assert numbers(env) == {"cursor": 0, "target": 5, "score": 0, "lives": 3}

    rewards = [env.step(RIGHT)[1] for _ in range(5)]

    assert rewards == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert numbers(env)["cursor"] == 5
    assert env.step(LEFT)[1] == 0.0
    assert numbers(env)["cursor"] == 4


def test_a_condition_ends_the_episode_and_its_info_has_the_numbers(tmp_path: Path) -> None:
    env = catch(tmp_path)
    env.reset()

    steps = [env.step(A) for _ in range(3)]

    assert [step[1:4] for step in steps] == [(-0.5, False, False)] * 2 + [(-0.5, True, False)]
    assert steps[-1][4] == {"cursor": 0, "target": 5, "score": 0, "lives": 0}
    assert steps[0][4] == {}


def test_the_episode_length_truncates(tmp_path: Path) -> None:
    env = catch(tmp_path, episode_length=3)
    env.reset()

    assert [env.step(NONE)[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]


@pytest.mark.parametrize("press", [1, 8, 23])
def test_buttons_are_held_for_exactly_the_frames_of_press(tmp_path: Path, press: int) -> None:
    env = GameBoy(**write_game(tmp_path, "timing"), press=press)
    env.reset()

    assert [env.step(action)[1] for action in (1, 0, 1, 1)] == [press, 0, press, press]


def test_the_screen_is_the_mean_of_squares_and_the_stack_has_the_newest_frame_last(
    tmp_path: Path,
) -> None:
    env = catch(tmp_path, render_mode="rgb_array", downscale=4, stack=2)
    first, _ = env.reset()
    assert np.array_equal(first[0], first[1])

    obs, *_ = env.step(RIGHT)

    picture = env.render()
    assert picture is not None
    means = picture[:, :, 0].reshape(36, 4, 40, 4).mean(axis=(1, 3)).astype(np.uint8)
    assert np.array_equal(obs[1], means)
    assert np.array_equal(obs[0], first[1])
    # Row 10 of tiles of 8 x 8 pixels; the cursor is in column 2 + 2 * 1.
    assert np.argwhere(obs[1] == 0).min(axis=0).tolist() == [10 * 2, 4 * 2]


def test_colours_become_their_luminance(tmp_path: Path) -> None:
    env = GameBoy(
        **write_game(tmp_path, "timing", color=True), downscale=1, render_mode="rgb_array"
    )
    env.reset()

    obs, *_ = env.step(0)

    picture = env.render()
    assert picture is not None
    assert np.abs(obs[-1] - picture @ [0.299, 0.587, 0.114]).max() <= 1.0


def test_memory_is_scaled_by_its_bounds(tmp_path: Path) -> None:
    env = catch(tmp_path, observation="memory")
    env.reset()

    obs, *_ = env.step(RIGHT)

    assert obs.tolist() == pytest.approx([1 / 7, 5 / 7, 0.0, 1.0])


def test_the_same_actions_give_the_same_episode_whatever_was_before(tmp_path: Path) -> None:
    arguments = write_game(tmp_path, "timing")
    fresh, used = GameBoy(**arguments), GameBoy(**arguments)
    used.reset()
    for n_steps in (1, 7, 2):  # after one step, the CPU waits in a HALT that follows an EI
        for _ in range(n_steps):
            used.step(1)
        fresh.reset()
        used.reset()
        for action in (1, 0, 1, 1, 0):
            fresh.step(action)
            used.step(action)
            assert everything(fresh) == everything(used)


@pytest.mark.parametrize("name", ["catch", "timing"])
@pytest.mark.parametrize(
    "n_steps", [20, pytest.param(1000, marks=pytest.mark.slow)], ids="{} steps".format
)
def test_a_restored_episode_continues_exactly(tmp_path: Path, name: str, n_steps: int) -> None:
    make = partial(GameBoy, **write_game(tmp_path, name), episode_length=10**6)
    env, random = make(), np.random.default_rng(1)
    obs, _ = env.reset(seed=1)
    for n_before in (1, 5):
        for _ in range(n_before):
            obs, *_ = env.step(random.integers(2))
        copy, seen = restore_snapshot(make(), take_snapshot(env, obs))
        assert np.array_equal(seen, obs)
        for action in random.integers(2, size=n_steps):
            ours, theirs = env.step(action), copy.step(action)
            assert np.array_equal(ours[0], theirs[0])
            assert ours[1:] == theirs[1:]
            assert everything(env) == everything(copy.unwrapped)


def test_the_bit_that_pyboys_states_leave_out_is_saved(tmp_path: Path) -> None:
    """Without it, the copy of this episode wakes up once more often."""
    env, copy = (GameBoy(**write_game(tmp_path, "timing")) for _ in range(2))
    env.reset()
    copy.reset()
    env.step(0)
    state = io.BytesIO()

    env._emulator.pyboy.save_state(state)
    state.seek(0)
    copy._emulator.pyboy.load_state(state)
    env.step(0)
    copy.step(0)
    differs = everything(env) != everything(copy)
    copy.set_state(env.get_state())
    env.step(0)
    copy.step(0)

    assert differs
    assert everything(env) == everything(copy)


def test_the_trial_before_training_accepts_the_snapshots(tmp_path: Path) -> None:
    make = partial(GameBoy, **write_game(tmp_path, "timing"), observation="both")

    assert why_no_snapshot(make(), make) is None


def test_a_snapshot_of_another_rom_or_pyboy_is_refused(tmp_path: Path) -> None:
    env, other = catch(tmp_path), GameBoy(**write_game(tmp_path, "timing"))
    env.reset()

    with pytest.raises(RomError, match="not the one of the saved episode"):
        other.set_state(env.get_state())
    state = env.get_state()
    state["emulator"]["pyboy"] = "2.7"
    with pytest.raises(RomError, match=r"saved with PyBoy 2\.7, but this is"):
        env.set_state(state)


def test_an_episode_starts_from_the_save_state(tmp_path: Path) -> None:
    env = catch(tmp_path)
    env.reset()
    for _ in range(4):
        env.step(RIGHT)
    with (tmp_path / "four.state").open("wb") as file:
        env._emulator.pyboy.save_state(file)

    later = catch(tmp_path, state=str(tmp_path / "four.state"))
    later.reset()

    assert numbers(later)["cursor"] == 4
    assert later.step(RIGHT)[1] == 1.0


def test_no_file_is_read_or_written_beside_the_rom(tmp_path: Path) -> None:
    battery = {"kind": 0x03, "ram": 2}  # saves its RAM
    arguments = write_game(tmp_path, "timing", **battery)
    Path(arguments["rom"] + ".ram").write_bytes(b"x")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    env = GameBoy(**arguments)
    env.reset()
    env.step(1)
    env.close()
    del env

    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_clock_of_the_cartridge_stands_still(tmp_path: Path) -> None:
    env = GameBoy(**write_game(tmp_path, "clock", kind=0x10, ram=2))
    env.reset()

    rewards = [env.step(0)[1] for _ in range(10)]  # four seconds of the game

    assert rewards == [0.0] * 10


@pytest.mark.slow
def test_several_emulators_in_a_worker_play_as_in_this_process(tmp_path: Path) -> None:
    make = partial(GameBoy, **write_game(tmp_path, "timing"), episode_length=4)
    actions = np.random.default_rng(1).integers(2, size=(6, 4))
    seen = []
    for kind in (partial(ParallelEnv, n_workers=1), SerialEnv):
        env = kind([make] * 4, seed=1)
        try:
            env.reset()
            seen.append([env.step(each)[:4] for each in actions])
        finally:
            env.close()

    for ours, theirs in zip(*seen, strict=True):
        for our, their in zip(ours, theirs, strict=True):
            assert np.array_equal(our, their)


@pytest.mark.parametrize("button", ["b", "start"])
def test_a_game_that_hangs_continues_without_change(tmp_path: Path, button: str) -> None:
    env = GameBoy(**write_game(tmp_path, "crash"))
    env.reset()
    hang = env.rules.actions.index((button,))

    env.step(hang)

    assert [env.step(0)[1] for _ in range(3)] == [0.0] * 3


@pytest.mark.slow
def test_an_opcode_that_does_not_exist_ends_at_the_deadline(tmp_path: Path) -> None:
    make = partial(GameBoy, **write_game(tmp_path, "crash"))
    env = ParallelEnv([make] * 2, seed=1, n_workers=1, step_timeout=8.0)
    try:
        env.reset()
        env.step(np.array([0, 0]))
        with pytest.raises(WorkerTimeoutError, match="killed while it ran env 1"):
            env.step(np.array([0, 1]))
    finally:
        env.close()


def test_a_step_before_the_reset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gym.error.ResetNeeded):
        catch(tmp_path).step(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observation": "sound"}, r"env\.kwargs\.observation=sound: must be screen \| memory"),
        ({"press": 24}, r"env\.kwargs\.press=24: must be 1 to 23"),
        ({"press": 0}, r"env\.kwargs\.press=0: must be"),
        ({"downscale": 3}, r"env\.kwargs\.downscale=3: must be 1, 2, 4, 8 or 16"),
        ({"stack": 0}, r"env\.kwargs\.stack=0: must be at least 1"),
        ({"episode_length": 0}, r"env\.kwargs\.episode_length=0: must be at least 1"),
        ({"render_mode": "human"}, r"env\.kwargs\.render_mode=human: must be rgb_array or null"),
        ({"rom": None}, r"env\.kwargs\.rom=None: must be the path of a ROM"),
        ({"game": None}, r"env\.kwargs\.game=None: must be the path of a game file"),
    ],
)
def test_impossible_arguments_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GameBoyError, match=message):
        GameBoy(**{**write_game(tmp_path, "catch"), **options})


def test_a_missing_pyboy_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyboy", None)
    arguments = write_game(tmp_path, "catch")

    with pytest.raises(MissingExtraError, match=r'pip install "ml_pipeline\[gameboy\]"'):
        EnvFactory(None, "ml_pipeline.worlds.game_boy.env.GameBoy", arguments)()
