"""Protocol Buffers' wire format, as much of it as SentencePiece's files use: https://protobuf.dev/programming-guides/encoding"""

import struct
from collections.abc import Iterator

from cutaway.errors import InputError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5


def fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """(field number, wire type, value): a whole number for VARINT, the bytes for the others."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise InputError("the file is no SentencePiece model (a field has number 0); get it again")
        if wire == VARINT:
            value, place = _varint(data, place)
            yield number, wire, value
            continue
        if wire == BYTES:
            size, place = _varint(data, place)
        elif wire in (EIGHT, FOUR):
            size = 8 if wire == EIGHT else 4
        else:
            raise InputError(f"the file is no SentencePiece model (wire type {wire}); get it again")
        if size > len(data) - place:
            raise InputError("the file is no whole SentencePiece model (it ends within a field); get it again")
        yield number, wire, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise InputError("the file is no whole SentencePiece model (it ends within a number); get it again")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise InputError("the file is no SentencePiece model (a number has more than ten bytes); get it again")


def as_float(value: int | memoryview) -> float:
    if isinstance(value, int) or len(value) != 4:
        raise InputError("the file is no SentencePiece model (a score is no 32-bit number); get it again")
    return float(struct.unpack("<f", value)[0])


def as_text(value: int | memoryview) -> str:
    try:
        return as_bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("the file is no SentencePiece model (a piece is not UTF-8); get it again") from error


def as_bytes(value: int | memoryview) -> bytes:
    if isinstance(value, int):
        raise InputError("the file is no SentencePiece model (a number stands for text); get it again")
    return bytes(value)


def as_int(value: int | memoryview) -> int:
    """Negative numbers are written as 64-bit two's complement."""
    if not isinstance(value, int):
        raise InputError("the file is no SentencePiece model (text stands for a number); get it again")
    return value - (1 << 64) if value >= 1 << 63 else value
