"""Game Boy ROMs for tests: a small assembler, and four games of our own in its language.

No byte is foreign: the header has no logo, which PyBoy's boot ROM does not check. The variables of
each game are at the start of the work RAM, as its comment says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROM_SIZE = 32 * 1024
_START = 0x150

# N is a byte, W a word, R a jump relative to the next instruction.
_TABLE = """
nop=00 | di=f3 | ei=fb | halt=76 | ret=c9 | reti=d9 | cpl=2f | push af=f5 | pop af=f1 |
push hl=e5 | pop hl=e1 | daa=27 | ld a, N=3e | ld b, N=06 | ld c, N=0e | ld a, b=78 |
ld a, c=79 | ld b, a=47 | ld c, a=4f | ld l, a=6f | ld a, [hl]=7e | ld [hl], a=77 |
ld a, [W]=fa | ld [W], a=ea | ldh a, [N]=f0 | ldh [N], a=e0 | ld hl, W=21 | ld sp, W=31 |
ld [hl+], a=22 | inc [hl]=34 | inc a=3c | dec a=3d | dec b=05 | xor a=af | xor b=a8 |
and b=a0 | and c=a1 | ret z=c8 | and a=a7 | and N=e6 | xor N=ee | add a, N=c6 | add a, a=87 |
adc a, N=ce | cp N=fe | cp b=b8 | rlca=07 | rrca=0f | jr R=18 | jr nz, R=20 | jr z, R=28 |
jr nc, R=30 | jr c, R=38 | jp W=c3 | call W=cd | db N=--
"""
_OPCODES = {
    form.strip(): None if code.strip() == "--" else int(code, 16)
    for form, code in (each.split("=") for each in _TABLE.split("|"))
}
_OPERAND = re.compile(r"(?<![\w])(0x[0-9a-f]+|\d+|\.\w+)(?![\w])")


def assemble(source: str, *, title: str, kind: int = 0, ram: int = 0, color: bool = False) -> bytes:
    """A ROM of 32 KiB from lines like ``.loop: ld a, [0xc000]``; text after ``;`` is a comment.

    ``kind`` and ``ram``: the bytes of the header that give the type of cartridge and its RAM.
    """
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    place = _START
    for line in source.splitlines():
        found_line = re.fullmatch(r"(?:(\.\w+):)?\s*([^;]*?)\s*(?:;.*)?", line.strip())
        assert found_line is not None
        label, code = found_line.groups()
        if label:
            labels[label] = place
        if code:
            found = _OPERAND.search(code)
            forms = [code.replace(found.group(), each, 1) for each in "NWR"] if found else [code]
            (form,) = [each for each in forms if each in _OPCODES]
            lines.append((form, found.group() if found else ""))
            place += _length(form)
    rom = bytearray(ROM_SIZE)
    place = _START
    for form, operand in lines:
        value = labels[operand] if operand in labels else int(operand or "0", 0)
        opcode = _OPCODES[form]
        place += _length(form)
        encoded = b"" if opcode is None else bytes([opcode])
        if "R" in form:
            encoded += (value - place).to_bytes(1, "little", signed=True)
        elif re.search(r"\b[NW]\b", form):
            encoded += value.to_bytes(2 if "W" in form else 1, "little")
        rom[place - len(encoded) : place] = encoded
    for vector, name in [(0x40, ".vblank"), (0x50, ".timer")]:
        rom[vector : vector + 3] = bytes([0xC3, *labels[name].to_bytes(2, "little")])
    rom[0x100:0x104] = bytes([0x00, 0xC3, *_START.to_bytes(2, "little")])  # nop, jp
    rom[0x134 : 0x134 + len(title)] = title.encode("ascii")
    rom[0x147], rom[0x149] = kind, ram
    rom[0x143] = 0x80 if color else 0
    rom[0x14D] = -sum(each + 1 for each in rom[0x134:0x14D]) & 0xFF
    return bytes(rom)


def _length(form: str) -> int:
    opcode = 0 if _OPCODES[form] is None else 1
    return opcode + (2 if "W" in form else 1 if re.search(r"\b[NR]\b", form) else 0)


# Switches the screen off, clears it, draws a black tile 1 and a grey tile 2, and switches it on.
_SCREEN = """
        di
        ld sp, 0xfffe
.dark:  ldh a, [0x44]           ; line that is being drawn
        cp 144
        jr nz, .dark
        xor a
        ldh [0x40], a
        ld hl, 0x8000
.clear: xor a                   ; all tiles and the map
        ld [hl+], a
        ld a, [0xff80]          ; a counter in high RAM: 32 x 256 bytes
        inc a
        ld [0xff80], a
        jr nz, .clear
        ld a, [0xff81]
        inc a
        ld [0xff81], a
        cp 32
        jr nz, .clear
        ld hl, 0x8010
        ld b, 16
        ld a, 0xff
.black: ld [hl+], a
        dec b
        jr nz, .black
        ld b, 8
.grey:  xor a
        ld [hl+], a
        ld a, 0xff
        ld [hl+], a
        dec b
        jr nz, .grey
        ld a, 0xe4
        ldh [0x47], a           ; palette
        ld a, 0x91
        ldh [0x40], a           ; screen on
"""

# Sets c to the pressed keys: 1 a, 2 b, 4 select, 8 start, 16 right, 32 left, 64 up, 128 down.
_KEYS = """
.keys:  ld a, 0x10
        ldh [0x00], a
        ldh a, [0x00]
        ldh a, [0x00]
        cpl
        and 0x0f
        ld b, a
        ld a, 0x20
        ldh [0x00], a
        ldh a, [0x00]
        ldh a, [0x00]
        cpl
        and 0x0f
        rlca
        rlca
        rlca
        rlca
        xor b
        ld c, a
        ret
"""

# Move the black cursor to the grey target with left and right: each target scores. Each press of A
# costs one of three lives. c000 cursor (0-7), c001 target (0-7), c002 score (16 bits), c004 score
# (two decimal digits), c005 lives, c006 keys of the last frame, c007 random number.
CATCH = f"""
{_SCREEN}
        xor a
        ld [0xc000], a
        ld [0xc002], a
        ld [0xc003], a
        ld [0xc004], a
        ld [0xc006], a
        ld a, 5
        ld [0xc001], a
        ld a, 3
        ld [0xc005], a
        ld a, 0x5a
        ld [0xc007], a
        ld a, 1
        ldh [0xff], a           ; the screen interrupts at the end of each frame
        ei
.loop:  halt
        nop
        call .frame
        jr .loop
.frame: call .keys
        ld a, [0xc006]
        cpl
        and c                   ; keys that are new in this frame
        ld b, a
        ld a, c
        ld [0xc006], a
        ld a, b
        and 0x10
        jr z, .noright
        ld a, [0xc000]
        cp 7
        jr z, .noright
        inc a
        ld [0xc000], a
.noright: ld a, b
        and 0x20
        jr z, .noleft
        ld a, [0xc000]
        and a
        jr z, .noleft
        dec a
        ld [0xc000], a
.noleft: ld a, b
        and 1
        jr z, .noa
        ld a, [0xc005]
        and a
        jr z, .noa
        dec a
        ld [0xc005], a
.noa:   ld a, [0xc007]          ; the next random number
        add a, a
        jr nc, .random
        xor 0x1d
.random: ld [0xc007], a
        ld a, [0xc000]
        ld b, a
        ld a, [0xc001]
        cp b
        jr nz, .draw
        ld a, [0xc002]
        add a, 1
        ld [0xc002], a
        ld a, [0xc003]
        adc a, 0
        ld [0xc003], a
        ld a, [0xc004]
        add a, 1
        daa
        ld [0xc004], a
        ld a, [0xc007]
        and 7
        cp b
        jr nz, .place
        add a, 3
        and 7
.place: ld [0xc001], a
.draw:  ld hl, 0x9902           ; row 8: the target
        call .wipe
        ld hl, 0x9942           ; row 10: the cursor
        call .wipe
        ld hl, 0x9902
        ld a, [0xc001]
        add a, a
        add a, 2
        ld l, a
        ld a, 2
        ld [hl], a
        ld hl, 0x9942
        ld a, [0xc000]
        add a, a
        add a, 0x42
        ld l, a
        ld a, 1
        ld [hl], a
        ret
.wipe:  ld b, 16
        xor a
.next:  ld [hl+], a
        dec b
        jr nz, .next
        ret
{_KEYS}
.vblank: reti
.timer: reti
"""

# Everything depends on when it happens. c000 frames with A held, c001 timer interrupts, c002 a
# mixture of the divider at every pass of the main loop, c003 frames.
TIMING = f"""
{_SCREEN}
        xor a
        ld [0xc000], a
        ld [0xc001], a
        ld [0xc002], a
        ld [0xc003], a
        ldh [0x06], a
        ld a, 5
        ldh [0x07], a           ; the timer interrupts 1,024 times a second
        ld a, 5
        ldh [0xff], a
.loop:  ei
        halt
        nop
        di
        ldh a, [0x04]
        ld b, a
        ld a, [0xc002]
        rlca
        xor b
        ld [0xc002], a
        call .keys
        ld a, c
        and 1
        jr z, .loop
        ld a, [0xc002]
        inc a                   ; A changes what follows, too
        ld [0xc002], a
        jr .loop
.vblank: push af
        push hl
        call .hold
        ld hl, 0xc003
        inc [hl]
        ld a, [0xc002]
        and 1
        inc a
        ld hl, 0x9900
        push af
        ld a, [0xc003]
        and 0x1f
        ld l, a
        pop af
        ld [hl], a
        pop hl
        pop af
        reti
.hold:  ld a, 0x10
        ldh [0x00], a
        ldh a, [0x00]
        ldh a, [0x00]
        cpl
        and 1
        ret z
        ld hl, 0xc000
        inc [hl]
        ret
.timer: push af
        ld a, [0xc001]
        inc a
        ld [0xc001], a
        pop af
        reti
{_KEYS}
"""

# A runs an opcode that does not exist, B loops for ever without interrupts, START switches the
# screen off and halts for ever. c000 frames.
CRASH = f"""
{_SCREEN}
        xor a
        ld [0xc000], a
        ld a, 1
        ldh [0xff], a
        ei
.loop:  halt
        nop
        ld hl, 0xc000
        inc [hl]
        call .keys
        ld a, c
        and 1
        jr nz, .illegal
        ld a, c
        and 2
        jr nz, .busy
        ld a, c
        and 8
        jr z, .loop
        xor a
        ldh [0xff], a
        ldh [0x40], a
        halt
        nop
        jr .loop
.illegal: db 0xd3
.busy:  di
.ever:  jr .ever
.vblank: reti
.timer: reti
{_KEYS}
"""

# Copies the seconds of the cartridge's clock to c000 in every frame.
CLOCK = f"""
{_SCREEN}
        ld a, 1
        ldh [0xff], a
        ei
.loop:  halt
        nop
        ld a, 0x0a
        ld [0x0000], a          ; the RAM of the cartridge can be used
        ld a, 8
        ld [0x4000], a          ; and is the seconds of the clock
        xor a
        ld [0x6000], a
        inc a
        ld [0x6000], a          ; which are copied now
        ld a, [0xa000]
        ld [0xc000], a
        jr .loop
.vblank: reti
.timer: reti
"""

GAMES = {"catch": CATCH, "timing": TIMING, "crash": CRASH, "clock": CLOCK}

GAME_FILES = {
    "catch": """\
title: CATCH
actions: [none, left, right, a]
addresses:
  cursor: {address: 0xC000, bounds: [0, 7]}
  target: {address: 0xC001, bounds: [0, 7]}
  score: {address: 0xC002, type: u16le, bounds: [0, 1000]}
  lives: {address: 0xC005, bounds: [0, 3]}
reward:
  score: delta.score
  lives: 0.5 * delta.lives
end:
  over: lives == 0
""",
    "timing": """\
actions: [none, a]
addresses:
  held: {address: 0xC000}
  mixture: {address: 0xC002}
reward: {held: delta.held}
""",
    "crash": """\
actions: [none, a, b, start]
addresses: {frames: {address: 0xC000}}
reward: {frames: delta.frames}
""",
    "clock": """\
addresses: {seconds: {address: 0xC000}}
reward: {seconds: delta.seconds}
""",
}


def write_game(folder: Path, name: str, **header: Any) -> dict[str, str]:
    """Write the ROM and the file of a game; returns the arguments of GameBoy."""
    rom, game = folder / f"{name}.gb", folder / f"{name}.yaml"
    rom.write_bytes(assemble(GAMES[name], title=name.upper(), **header))
    game.write_text(GAME_FILES[name])
    return {"rom": str(rom), "game": str(game)}
