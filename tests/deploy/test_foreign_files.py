"""A policy file of someone else: it runs no code unasked, reads no other file, and is checked."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import Capture, Trap, error_line, small
from onnx import TensorProto, helper

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.load import export_run
from ml_pipeline.assembly.run import train
from ml_pipeline.deploy import export
from ml_pipeline.deploy.exported import ExportedPolicy, PolicyFileError, with_checksum
from ml_pipeline.errors import UserError
from ml_pipeline.runs.signatures import UntrustedError

pytestmark = pytest.mark.xdist_group("foreign_files")  # one process makes the files, once

EVIL = """
import pathlib
import gymnasium
pathlib.Path("sprung").touch()
class Env(gymnasium.Env): ...
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """policy.pt2 and policy.onnx of a small run, and policy files of an own env; all signed."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(export, "N_OBSERVATIONS", 100)  # test_export.py checks exports
        settings = [*small(), "~callbacks.evaluation"]
        for name, more in (("policy", []), ("own", ["env.target=tiny_envs.CountingEnv"])):
            run = train([*settings, *more]).run_dir
            for file_format in ("pt2", "onnx"):
                out = folder / f"{name}.{file_format}"
                export_run(run, out, file_format=file_format)
        yield folder


@pytest.fixture
def files(template: Path, here: Path) -> Path:
    """Copies of the files in the current folder; evil.py is there, too."""
    for path in template.glob("*.*"):
        if path.is_file():
            shutil.copy(path, here)
    (here / "evil.py").write_text(EVIL)
    sys.modules.pop("evil", None)
    return here


@pytest.fixture
def foreign(files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same files, exported by another user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    return files


def rewrite_zip(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))


def with_metadata(change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the metadata of policy.onnx, and make it a file without a checksum, as older ones."""
    model = onnx.load("policy.onnx")
    (entry,) = model.metadata_props
    metadata = json.loads(entry.value)
    del metadata["checksum"]
    model.DiscardUnknownFields()
    changed = change(metadata)
    entry.value = json.dumps(metadata) if changed is None else changed
    onnx.save(model, "policy.onnx")


@pytest.mark.parametrize(
    "name",
    [
        "policy.onnx",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("policy.pt2", "own.pt2", "own.onnx")
        ),
    ],
)
def test_own_export_needs_no_trust(name: str, files: Path) -> None:
    assert main(["play", name, "--episodes", "1"]) == 0


def test_signed_files_are_valid_for_other_readers(files: Path) -> None:
    onnx.checker.check_model(onnx.load("policy.onnx"))
    with zipfile.ZipFile("policy.pt2") as archive:
        assert archive.testzip() is None
        assert len(archive.comment) == 65


@pytest.mark.parametrize("command", ["play", "serve"])
def test_pt2_of_another_user_runs_no_code(command: str, foreign: Path, capsys: Capture) -> None:
    trap = "__import__('pathlib').Path('sprung').touch()"

    def set_trap(name: str, content: bytes) -> bytes:
        if not name.endswith("model.json"):
            return content
        text, n = re.subn(r'"expr_str": "[^"]*"', f'"expr_str": "{trap}"', content.decode())
        assert n
        return text.encode()

    rewrite_zip(foreign / "policy.pt2", set_trap)

    assert main([command, "policy.pt2"]) == 1

    error = error_line(capsys)
    assert error.startswith("policy.pt2: this user did not export it, or it has changed since")
    assert "add --trust if you trust its author" in error
    assert not (foreign / "sprung").exists()
    assert main(["play", "policy.pt2", "--trust"]) == 1
    assert (foreign / "sprung").exists()  # the trap works


def test_pickle_inside_a_pt2_is_not_run(foreign: Path) -> None:
    torch.save(Trap(), "trap.pt")
    trap, replaced = Path("trap.pt").read_bytes(), []

    def set_trap(name: str, content: bytes) -> bytes:
        if name.endswith(".pt"):
            replaced.append(name)
            return trap
        return content

    rewrite_zip(foreign / "policy.pt2", set_trap)

    with pytest.raises(PolicyFileError, match="is not an exported policy"):
        ExportedPolicy.load("policy.pt2", trust=True)

    assert replaced
    assert not Path("sprung").exists()
    torch.load("trap.pt", weights_only=False)
    assert Path("sprung").exists()  # the trap works


def test_trust_accepts_a_pt2_of_another_user(foreign: Path) -> None:
    with pytest.raises(UntrustedError):
        ExportedPolicy.load("policy.pt2")

    assert ExportedPolicy.load("policy.pt2", trust=True).env_name == "CartPole-v1"
    assert main(["play", "policy.pt2", "--trust", "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"target": "evil.Env"}, "policy.onnx: env.target=evil.Env: "),
        ({"id": "evil:Env-v0"}, "policy.onnx: env.id=evil:Env-v0: "),
        (
            {"wrappers": {"x": {"_target_": "os.system", "command": "touch sprung"}}},
            "policy.onnx: env.wrappers.x._target_=os.system: ",
        ),
    ],
)
def test_onnx_of_another_user_names_no_own_code(
    env: dict[str, Any], shown: str, foreign: Path, capsys: Capture
) -> None:
    with_metadata(lambda metadata: metadata["env"].update(env))

    assert main(["play", "policy.onnx"]) == 1

    assert shown in error_line(capsys)
    assert not (foreign / "sprung").exists()


def test_changed_onnx_is_no_longer_own(files: Path, capsys: Capture) -> None:
    content, signed = (Path(f"{name}.onnx").read_bytes()[:-67] for name in ("own", "policy"))
    mixed = content[:-68] + signed[-68:]  # the signature of another file
    Path("own.onnx").write_bytes(with_checksum(mixed))

    assert main(["play", "own.onnx"]) == 1

    assert "env.target=tiny_envs.CountingEnv: " in error_line(capsys)


def leaking(location: str, how: str) -> bytes:
    """policy.onnx whose output ``policy`` shows two bytes of another file."""
    model = onnx.load("policy.onnx")
    model.DiscardUnknownFields()
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = "inner" if name == "policy" else name
    tensor = TensorProto(name="leak", data_type=TensorProto.UINT8, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "2")):
        tensor.external_data.add(key=key, value=value)
    if how == "initializer":
        model.graph.initializer.append(tensor)
    else:
        constant = helper.make_node("Constant", [], ["leak"], value=tensor)
        model.graph.node.insert(0, constant)
    model.graph.node.extend(
        [
            helper.make_node("Sub", ["inner", "inner"], ["zero"]),
            helper.make_node("CastLike", ["leak", "zero"], ["leaked"]),
            helper.make_node("Add", ["zero", "leaked"], ["policy"]),
        ]
    )
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("how", ["initializer", "constant"])
@pytest.mark.parametrize("location", ["secret", "../secret", "/etc/passwd", "*/_ORT_MEM_ADDR_/*"])
def test_onnx_cannot_read_another_file(location: str, how: str, foreign: Path) -> None:
    (foreign / "secret").write_bytes(b"hi")

    with pytest.raises(PolicyFileError, match="a tensor is stored outside the file"):
        ExportedPolicy.from_bytes(leaking(location, how), "x.onnx")


@pytest.mark.parametrize("trust", [False, True])
def test_flipped_byte_in_a_pt2_is_found(trust: bool, foreign: Path) -> None:
    content = Path("policy.pt2").read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        weights = next(each for each in archive.infolist() if each.filename.endswith("weight_2"))
    place = weights.header_offset + 1_000  # in the weights, after the header and its padding

    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    with pytest.raises(PolicyFileError, match=r"^x\.pt2 is not .*: the checksum of .*weight_2"):
        ExportedPolicy.from_bytes(flipped, "x.pt2", trust=trust)


def test_each_flipped_byte_of_an_onnx_is_found(files: Path) -> None:
    content = Path("policy.onnx").read_bytes()
    places = [*np.linspace(0, len(content) - 200, 150, dtype=int), *range(-200, 0)]

    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1
        with pytest.raises(PolicyFileError, match=r"^x\.onnx [^\n]+$"):
            ExportedPolicy.from_bytes(bytes(flipped), "x.onnx")
    with pytest.raises(PolicyFileError, match=r"^x\.onnx does not end with its checksum"):
        ExportedPolicy.from_bytes(content + b"\x08\x00", "x.onnx")


def test_onnx_that_another_tool_changed_is_refused(files: Path, capsys: Capture) -> None:
    model = onnx.load("policy.onnx")
    model.producer_name = "another"
    onnx.save(model, "policy.onnx")

    assert main(["play", "policy.onnx"]) == 1

    assert "it is damaged, or was changed after the export" in error_line(capsys)


@pytest.mark.parametrize("name", ["policy.pt2", "policy.onnx"])
def test_damaged_file_is_one_line(name: str, foreign: Path) -> None:
    content = Path(name).read_bytes()
    random = np.random.default_rng(1)
    damaged = [b"", content[: len(content) // 2], b"PK\x05\x06" + bytes(18), b"ORTM" + content]
    for place in random.integers(len(content), size=30):
        damaged.append(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])

    for each in damaged:
        try:
            ExportedPolicy.from_bytes(each, name, trust=True)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017, torch ignores some bytes of a .pt2


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(metadata: dict[str, Any]) -> None:
        for key in path[:-1]:
            metadata = metadata[key]
        metadata[path[-1]] = value

    return change


METADATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "words": lambda _: "hello",
    "list": lambda _: "[]",
    "number": lambda _: "5",
    "deep": lambda _: "[" * 100_000,
    "huge number": lambda _: "9" * 5_000,
    "no env": lambda metadata: metadata.pop("env") and None,
    "env list": put("env", value=[1]),
    "no env name": lambda metadata: metadata.pop("env_name") and None,
    "env name": put("env_name", value=["x"]),
    "space list": put("observation_space", value=[1]),
    "space kind": put("observation_space", "kind", value="Cube"),
    "space of wrong shape": put("observation_space", "shape", value=[5]),
    "space of huge shape": put("observation_space", "shape", value=[10**15]),
    "space of negative shape": put("observation_space", "shape", value=[-1]),
    "space bounds": put("observation_space", "low", value={"a": 1}),
    "no actions": put("action_space", "n", value=0),
    "other actions": put("action_space", value={"kind": "MultiBinary", "shape": [3]}),
    "inputs list": put("inputs", value=[1]),
    "no inputs": put("inputs", value={}),
    "unknown input": put("inputs", "more", value={"dtype": "float32", "shape": [], "leaf": None}),
    "input of unknown leaf": put("inputs", "obs", "leaf", value="camera"),
    "input of wrong shape": put("inputs", "obs", "shape", value=[7]),
    "input shape": put("inputs", "obs", "shape", value="wide"),
    "input dtype": put("inputs", "obs", "dtype", value="object"),
    "input of unknown dtype": put("inputs", "obs", "dtype", value="float7"),
    "input of wrong dtype": put("inputs", "obs", "dtype", value="int64"),
    "no outputs": put("outputs", value={}),
    "unknown output": put("outputs", "more", value={"dtype": "float32", "shape": []}),
    "output dtype": put("outputs", "policy", "dtype", value="int8"),
    "output shape": put("outputs", "policy", "shape", value=[9]),
    "mask leaf": put("mask_leaf", value="mask"),
    "mask leaf list": put("mask_leaf", value=[1]),
}


@pytest.mark.parametrize("name", METADATA)
def test_wrong_metadata_is_one_line(name: str, foreign: Path, capsys: Capture) -> None:
    with_metadata(METADATA[name])

    for command in ("play", "serve"):
        assert main([command, "policy.onnx"]) == 1
        assert error_line(capsys).startswith("policy.onnx has damaged metadata: ")


@pytest.mark.parametrize(
    "env",
    [
        {"colour": "red"},
        {"kwargs": [1]},
        {"kwargs": {"x": 1}},
        {"wrappers": [1]},
        {"wrappers": {"x": 1}},
        {"id": 5},
        {"id": None},
        {"id": "\x1b[2J"},
    ],
    ids=str,
)
def test_wrong_env_in_the_metadata_is_one_line(
    env: dict[str, Any], foreign: Path, capsys: Capture
) -> None:
    with_metadata(lambda metadata: metadata["env"].update(env))

    assert main(["play", "policy.onnx", "--episodes", "1"]) == 1

    assert "\x1b" not in error_line(capsys)


def test_name_of_the_env_is_printable(foreign: Path, capsys: Capture) -> None:
    with_metadata(put("env_name", value="Pole\x1b[2J\ud800"))

    assert main(["play", "policy.onnx", "--episodes", "1"]) == 0

    assert "Pole\ufffd[2J\ufffd, greedy actions" in capsys.readouterr().out
