"""Parser of sentencepiece model files: pieces, scores and normalizer options.

The library does not give access to all of them.

The file is a protocol buffer (sentencepiece_model.proto): each field is a key, number · 8 + type, and a
value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

Value = int | bytes


class PieceType(IntEnum):
    """Types of pieces.

    Only NORMAL pieces result from merges, and CONTROL pieces never occur in a text.
    """

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass
class SentencePieceModel:
    """Content of a sentencepiece model file.

    Attributes:
        pieces, scores, types: piece, score and type of each id.
        charsmap: compiled normalization rules; empty if text is not normalized.
        add_dummy_prefix: whether a space is added at the start of a text.
        remove_extra_whitespaces: whether other leading spaces are removed and runs of spaces are merged.
    """

    model_type: int = ModelType.UNIGRAM
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)


def parse(content: bytes) -> SentencePieceModel:
    """Parse a model file that sentencepiece has loaded."""
    model = SentencePieceModel()
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            model.pieces.append(_bytes(piece.get(1, b"")).decode())
            model.scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            model.types.append(_int(piece.get(3, PieceType.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
            model.model_type = _int(trainer.get(3, ModelType.UNIGRAM))
            model.whitespace_as_suffix, model.byte_fallback = (
                bool(trainer.get(24, 0)),
                bool(trainer.get(35, 0)),
            )
        elif number == 3:
            rules = dict(_fields(_bytes(value)))
            model.charsmap = _bytes(rules.get(2, b""))
            model.add_dummy_prefix, model.remove_extra_whitespaces, model.escape_whitespaces = (
                bool(rules.get(i, 1)) for i in (3, 4, 5)
            )
    return model


def _bytes(value: Value) -> bytes:
    assert isinstance(value, bytes)
    return value


def _int(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _fields(content: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field of a message."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
        else:
            size, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            yield key >> 3, content[at : at + size]
            at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Decode a varint, and return its value and the offset after it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
