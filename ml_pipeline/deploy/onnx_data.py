"""check_self_contained: an .onnx file must hold its tensors itself.

A tensor with external data makes onnxruntime read another file, or an address in memory, and its
bytes become outputs of the policy. This module finds such tensors in the bytes of the file, before
onnxruntime sees them and without the package onnx. It knows only the fields that lead to tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

# Message -> field number -> message in that field; see onnx.proto.
_PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # how protobuf writes a field


def check_self_contained(content: bytes) -> None:
    """Raise ``ValueError`` unless ``content`` is a model without external data."""
    messages = [("model", memoryview(content))]
    while messages:
        kind, message = messages.pop()
        for number, value in _fields(message):
            is_default = number == _DATA_LOCATION and value == 0
            if kind == "tensor" and number in (_EXTERNAL_DATA, _DATA_LOCATION) and not is_default:
                raise ValueError("a tensor is stored outside the file; save the model as one file")
            part = _PARTS[kind].get(number)
            if part is not None and isinstance(value, memoryview):
                messages.append((part, value))


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: their numbers, and integers or bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, how = tag >> 3, tag & 7
        if tag >= 2**32 or number == 0:
            raise ValueError("not a protobuf message")
        value: int | memoryview
        if how == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        sizes = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
        if how == _LENGTH:
            size, position = _varint(message, position)
        elif how in sizes:
            size = sizes[how]
        else:
            raise ValueError("not a protobuf message")
        if position + size > len(message):
            raise ValueError("the file is truncated")
        yield number, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """An integer of 7 bits per byte, lowest first, and the position after it."""
    value = 0
    for index in range(10):
        if position + index >= len(message):
            raise ValueError("the file is truncated")
        byte = message[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("not a protobuf message")
