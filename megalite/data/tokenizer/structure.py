"""Structure of a tokenizer, independent of the file format and the library version.

Of a byte-pair encoding the merges are listed in order. Where every way to split a piece into two pieces is a
merge, as in a sentencepiece model, whose ranks belong to pieces, the pieces in that order say the same; so a
sentencepiece model and its tokenizer.json have one form.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megalite.data.tokenizer.sentencepiece_model import ModelType, PieceType, SentencePieceModel

BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""How sentencepiece spells the bytes of a character without a piece."""
SPACE = "\u2581"
"""How sentencepiece spells a space in a piece."""


@dataclass(frozen=True)
class TokenizerStructure:
    """Structure of a tokenizer.

    Attributes:
        pieces: the spelling of each id, as in its files; empty if the id has none.
        special: ids that never result from text, only from a chat template → the white space that they
            absorb, usually none.
        rules: type of the model, followed by merges or scores.
    """

    pieces: list[str]
    special: dict[int, str]
    rules: list[str]

    def texts(self) -> list[str]:
        """Return the text of each piece, as far as it is valid UTF-8."""
        to_byte = {letter: byte for byte, letter in enumerate(byte_letters())}
        if not {"\u0120", byte_letters()[0]} & set(self.pieces):  # not byte-level
            return [piece.replace(SPACE, " ") for piece in self.pieces]
        return [_decoded(piece, to_byte) for piece in self.pieces]


def _decoded(piece: str, to_byte: dict[str, int]) -> str:
    values = [to_byte.get(letter) for letter in piece]
    known = [value for value in values if value is not None]
    return bytes(known).decode(errors="replace") if len(known) == len(values) else piece


def byte_letters() -> list[str]:
    """Return the letter of each byte in GPT-2's byte-level pieces.

    Visible characters represent themselves, others are mapped to U+0100 and above.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def of_bytes(eos: str) -> TokenizerStructure:
    """Return the structure of the byte tokenizer with EOS."""
    return TokenizerStructure([*byte_letters(), eos], {256: ""}, ["BPE"])


def of_sentencepiece(model: SentencePieceModel) -> TokenizerStructure:
    special = {i: "" for i, kind in enumerate(model.types) if kind in (PieceType.CONTROL, PieceType.UNKNOWN)}
    normal = [i for i, kind in enumerate(model.types) if kind == PieceType.NORMAL]
    if model.model_type == ModelType.BPE:
        whole = {model.pieces[i] for i in normal}
        ranked = sorted(normal, key=lambda i: (-model.scores[i], i))
        rules = ["BPE", *(model.pieces[i] for i in ranked if any(splits(model.pieces[i], whole)))]
    else:
        rules = [
            ModelType(model.model_type).name.capitalize(),
            *_scored((model.pieces[i], model.scores[i]) for i in normal),
        ]
    return TokenizerStructure(list(model.pieces), special, rules)


def of_tokenizer_json(content: dict[str, Any], pieces: dict[str, int]) -> TokenizerStructure:
    """Return the structure of a tokenizer of the tokenizers library.

    Args:
        content: tokenizer.json.
        pieces: piece → id, including added tokens.
    """
    model, added = content["model"], content.get("added_tokens") or []
    kind = model.get("type", "BPE" if "merges" in model else "WordPiece")  # old files do not name it
    reserved = BYTE_PIECES | {token["content"] for token in added}
    if kind == "BPE":
        rules = [kind, *_merges(model.get("merges") or [], model["vocab"], reserved)]
    elif kind == "Unigram":
        rules = [kind, *_scored((piece, score) for piece, score in model["vocab"] if piece not in reserved)]
    else:
        rules = [kind]
    special = {token["id"]: _taken_in(token) for token in added if token.get("special")}
    return TokenizerStructure(spelled(pieces), dict(sorted(special.items())), rules)


def spelled(pieces: dict[str, int]) -> list[str]:
    """Return the spelling of each id."""
    by_id = [""] * (max(pieces.values(), default=-1) + 1)
    for piece, i in pieces.items():
        by_id[i] = piece
    return by_id


def splits(piece: str, whole: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of pieces that form a piece."""
    pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
    return ((left, right) for left, right in pairs if left in whole and right in whole)


def _merges(
    merges: Sequence[str | Sequence[str]], vocabulary: Iterable[str], reserved: frozenset[str]
) -> list[str]:
    """Return the pieces in merge order if the merges are all their splits, otherwise the ordered merges.

    Merges to control tokens and bytes, which sentencepiece does not know and conversions of it have, are left
    out: where they occur in a text, its ids differ.
    """
    pairs = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]
    pairs = [(left, right) for left, right in pairs if reserved.isdisjoint((left, right, left + right))]
    grouped = groupby(pairs, key="".join)
    whole = set(vocabulary) - reserved
    if all(set(group) == set(splits(piece, whole)) for piece, group in grouped):
        return [piece for piece, _ in groupby(pairs, key="".join)]
    return [" ".join(pair) for pair in pairs]


def _scored(entries: Iterable[tuple[str, float]]) -> list[str]:
    """Format pieces with their scores.

    sentencepiece stores scores in 32 bits, tokenizer.json in 64.
    """
    return [f"{piece} {struct.pack('<f', score).hex()}" for piece, score in entries]


def _taken_in(token: dict[str, Any]) -> str:
    return " ".join(name for name in ("lstrip", "rstrip", "single_word") if token.get(name))
