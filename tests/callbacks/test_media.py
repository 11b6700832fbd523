"""Videos, and the data that TensorBoard, Trackio and W&B get in addition to the metrics."""

from __future__ import annotations

import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Capture, error_line, read_rows, small, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from wandb.proto import wandb_internal_pb2

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import train
from ml_pipeline.errors import UserError
from ml_pipeline.extras import MissingExtraError


def test_evaluate_records_each_episode(finished_run: Path, capsys: Capture) -> None:
    run = finished_run
    assert main(["evaluate", str(run), "--video", "--episodes", "2", "--deterministic"]) == 0

    *videos, _, figures = capsys.readouterr().out.splitlines()
    assert videos == [f"{run}/videos/best-64-episode-{k}.mp4" for k in range(2)]
    assert all(b"ftyp" in Path(video).read_bytes()[:16] for video in videos)
    assert figures.startswith("return: mean")


def test_env_that_cannot_render_is_refused(here: Path, capsys: Capture) -> None:
    run = train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir

    assert main(["evaluate", str(run), "--video"]) == 1

    assert "env.kwargs.render_mode" in error_line(capsys)


def test_run_records_videos_of_itself(here: Path) -> None:
    run = train([*small(), "callbacks=video", "callbacks.video.every_steps=32"]).run_dir

    videos = sorted(path.name for path in (run / "videos").glob("*.mp4"))
    assert videos == ["step-32-episode-0.mp4", "step-64-episode-0.mp4"]


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        ("moviepy", ["callbacks=video"], "a video needs moviepy, .*ml_pipeline.look"),
        ("pygame", ["callbacks=video"], "a video needs pygame, .*classic-control"),
        ("tensorboard", ["logger=tensorboard"], "needs tensorboard, .*ml_pipeline.look"),
        ("trackio", ["logger=trackio"], "logger=trackio needs trackio, .*ml_pipeline.look"),
    ],
)
def test_missing_package_of_a_callback_or_logger_is_found_before_the_run_starts(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingExtraError, match=words):
        train([*small(total_steps=10**9), *arguments])

    assert not list(here.glob("runs/*/*"))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("tiny_envs.CountingEnv", "env.kwargs.render_mode"),
        ("own_parts.Frameless", "but the env rendered None"),
    ],
)
def test_env_that_cannot_be_filmed_is_found_before_the_run_starts(
    here: Path, env: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train([*small(total_steps=10**9), "callbacks=video", f"env.target={env}"])

    assert not list(here.glob("runs/*/*"))


@pytest.mark.slow
def test_tensorboard_has_the_rows_of_metrics_csv_without_duplicates_after_a_resume(
    here: Path,
) -> None:
    settings = small(logger="tensorboard", callbacks__checkpoints__every_steps=10_000)
    run = train([*settings, "callbacks.media.every_steps=32"]).run_dir
    train([f"resume={run}", "total_steps=128"])

    rows = read_rows(run)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    logged = events.Scalars("loss/policy")
    assert [each.step for each in logged] == [int(row["env_steps"]) for row in rows]
    values = [float(row["loss/policy"]) for row in rows]
    assert [each.value for each in logged] == pytest.approx(values)
    assert sorted(events.Tags()["histograms"]) == ["rollout/actions", "rollout/advantages"]


def test_tensorboard_has_the_hyperparameters_and_the_names_of_their_metrics(here: Path) -> None:
    settings = [*small(logger="tensorboard"), "best_metric=loss/value", "agent.gamma=0.9"]
    settings.append("network.hidden_sizes=[64,64]")
    run = train(settings).run_dir
    train([f"resume={run}", "total_steps=128"])

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    content = {
        tag: events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
        for tag in ("session_start_info", "experiment")
    }
    start = metadata.parse_session_start_info_plugin_data(content["session_start_info"])
    assert start.hparams["agent.gamma"].number_value == 0.9
    assert start.hparams["network.hidden_sizes"].string_value == "[64, 64]"
    assert start.hparams["agent.normalize_obs"].string_value == "false"
    assert start.hparams["env.id"].string_value == "CartPole-v1"
    assert not any(name.startswith(("logger", "callbacks", "device")) for name in start.hparams)
    experiment = metadata.parse_experiment_plugin_data(content["experiment"])
    names = [info.name.tag for info in experiment.metric_infos]
    assert names == ["rollout/episode_return_mean_100", "loss/value"]
    for name in names:  # TensorBoard shows the last value of the scalar of this name
        last = float(read_rows(run)[-1][name])
        assert events.Scalars(name)[-1].value == pytest.approx(last)
    assert [path.name for path in (run / "tensorboard").iterdir() if path.is_dir()] == []


def test_trackio_stores_a_run_on_this_machine(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for module in ("trackio.utils", "trackio.sqlite_storage"):  # it reads its folder on import
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", here / "trackio")

    train(small(logger="trackio"))

    (path,) = (here / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        (count,) = database.execute("select count(*) from metrics").fetchone()
    assert count == 2
    assert "Trackio, project " in capsys.readouterr().out


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline W&B file: LevelDB's log format after a header of 7 bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0:
            place += left
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.slow
def test_wandb_stores_curves_histograms_and_the_checkpoint(here: Path) -> None:
    settings = [*small(logger="wandb"), "logger.wandb.mode=offline"]
    run = train([*settings, "callbacks.media.every_steps=32"]).run_dir
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: any(r.WhichOneof("record_type") == "exit" for r in wandb_records(path)), 20)

    records = list(wandb_records(path))

    logged: dict[str, list[str]] = {}
    for record in records:
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            logged.setdefault(name, []).append(item.value_json)
    rows = read_rows(run)
    assert [float(value) for value in logged["loss/policy"]] == [
        float(row["loss/policy"]) for row in rows
    ]
    for name in ("rollout/actions", "rollout/advantages"):
        assert logged[f"{name}/_type"] == ['"histogram"'] * 2
    artifacts = [(r.artifact.type, r.artifact.name) for r in records if r.artifact.name]
    assert ("checkpoint", f"{run.name}-checkpoint") in artifacts
