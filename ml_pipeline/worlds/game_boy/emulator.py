"""Emulator: PyBoy without window and sound, which repeats exactly and writes no file.

It reads the ROM into memory, so PyBoy neither reads nor writes files beside it. The clock of the
cartridge stands still. PyBoy's save states leave out a bit of the CPU, so ``save`` adds it.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zlib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.extras import import_extra
from ml_pipeline.foreign import read_regular
from ml_pipeline.records import StateDict
from ml_pipeline.worlds.game_boy.rules import Cartridge

if TYPE_CHECKING:
    from pyboy import PyBoy

START_FRAMES = 120  # from power-on, without a save state; the boot ROM takes about 74
_BANK = 16 * 1024
_RAM_BANKS = {0: 0, 1: 1, 2: 1, 3: 4, 4: 16, 5: 8}  # of 8 KiB, by the header's byte 0x149
_MBC2 = (0x05, 0x06)  # these cartridges have RAM that the header does not count
_CLOCKS = (0x0F, 0x10)  # cartridge types with a real-time clock


class RomError(UserError):
    """The file is not a complete ROM, or not a save state of it."""


class Rom(NamedTuple):
    """A Game Boy ROM, checked."""

    data: bytes
    digest: str
    cartridge: Cartridge
    has_clock: bool


_FILE_BYTES = 64 * 2**20  # a ROM has at most 8 MiB, a save state less than 1 MiB


def read_rom(path: Path) -> Rom:
    """Read a ROM; refuse a file that is truncated, damaged or something else."""
    data = _read_file(path, "rom")
    header = data[:0x150]
    if len(header) < 0x150 or header[0x14D] != -sum(x + 1 for x in header[0x134:0x14D]) & 0xFF:
        raise RomError(f"rom={path}: is not a Game Boy ROM (the checksum of its header is wrong)")
    declared = 2 * _BANK << header[0x148] if header[0x148] <= 8 else 0
    if not declared or len(data) < declared or len(data) % _BANK:
        size = f"{declared:,}" if declared else "an unknown number of"
        raise RomError(
            f"rom={path}: its header declares {size} bytes, but the file has {len(data):,}; "
            "the file is truncated or damaged"
        )
    kind, is_color = header[0x147], bool(header[0x143] & 0x80)
    title = header[0x134 : 0x142 if is_color else 0x143].split(b"\0")[0].decode("latin-1")
    n_ram_banks = 1 if kind in _MBC2 else _RAM_BANKS.get(header[0x149], 0)
    cartridge = Cartridge(title, is_color, n_ram_banks)
    return Rom(data, hashlib.sha256(data).hexdigest(), cartridge, kind in _CLOCKS)


def _read_file(path: Path, key: str) -> bytes:
    try:
        return read_regular(path, most_bytes=_FILE_BYTES)
    except OSError as error:
        raise RomError(f"{key}={path}: {error.strerror or error}") from error


class Emulator:
    """One Game Boy; ``pyboy`` is PyBoy's object, for ticks, memory and screen."""

    def __init__(self, rom: Rom, state: Path | None = None) -> None:
        pyboy = _import_pyboy()
        self._digest, self._version = rom.digest, version("pyboy")
        try:
            self.pyboy: PyBoy = pyboy.PyBoy(
                io.BytesIO(rom.data),
                window="null",
                sound_emulated=False,
                no_input=True,  # from a window
                log_level=9,  # none: PyBoy prints INFO at every named level
            )
        except (pyboy.utils.PyBoyException, KeyError) as error:
            raise RomError(f"PyBoy cannot run this ROM: {first_line(error)}") from error
        if rom.has_clock:
            self.pyboy.rtc_lock_experimental(True)
        if state is None:
            self.pyboy.tick(START_FRAMES, True, False)
        else:
            self._load_user_state(state)
        self._start = self.save()

    def reset(self) -> None:
        """Return to the start: the save state, or two seconds after power-on."""
        self.load(self._start)

    def save(self) -> StateDict:
        """Everything that decides the future."""
        cpu = [each if isinstance(each, int) else None for each in _fields(self._cpu())]
        return {
            "rom": self._digest,
            "pyboy": self._version,
            "state": zlib.compress(self._state(), 1),
            "cpu": cpu,  # None: a reference to another part
        }

    def load(self, saved: StateDict) -> None:
        """Continue from a result of ``save``, of this or another process."""
        if saved["rom"] != self._digest:
            raise RomError("the ROM is not the one of the saved episode; use that one")
        if saved["pyboy"] != self._version:
            versions = f"PyBoy {saved['pyboy']}, but this is {self._version}"
            raise RomError(f"the episode was saved with {versions}; install that version")
        self.pyboy.load_state(io.BytesIO(zlib.decompress(saved["state"])))
        cpu = self._cpu()
        pairs = zip(saved["cpu"], _fields(cpu), strict=True)
        cpu.__setstate__(tuple(new if old is None else old for old, new in pairs))

    def stop(self) -> None:
        self.pyboy.stop(save=False)

    def _state(self) -> bytes:
        file = io.BytesIO()
        self.pyboy.save_state(file)
        return file.getvalue()

    def _cpu(self) -> Any:
        """PyBoy's CPU, which only the pickle support of Cython reaches.

        A save state leaves out whether a HALT follows an EI, which decides how the CPU wakes up.
        """
        (cpu,) = _fields(self.pyboy.register_file)
        return cpu

    def _load_user_state(self, path: Path) -> None:
        """Load the save state of the user; it has the length of a state of this cartridge."""
        data, expected = _read_file(path, "state"), self._state()
        fix = "make one with this ROM and PyBoy (docs/game_boy.md)"
        if data[:1] == expected[:1] and len(data) != len(expected):
            raise RomError(
                f"state={path}: has {len(data):,} bytes, but a state of this ROM has "
                f"{len(expected):,}; {fix}"
            )
        try:
            self.pyboy.load_state(io.BytesIO(data))
        except Exception as error:  # PyBoy raises many types for damaged states
            raise RomError(f"state={path}: cannot be loaded: {first_line(error)}; {fix}") from error


def _fields(part: Any) -> tuple[Any, ...]:
    """All fields of one of PyBoy's compiled objects."""
    fields: tuple[Any, ...] = part.__reduce__()[2]
    return fields


def _import_pyboy() -> ModuleType:
    """Import PyBoy without the packages of its windows: 20 MB and half a second per worker."""
    unused = [name for name in ("sdl2", "OpenGL", "glfw") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(unused))  # type: ignore[arg-type]  # None: ImportError
    try:
        return import_extra("pyboy", needed_by="GameBoy")
    finally:
        for name in unused:
            del sys.modules[name]
