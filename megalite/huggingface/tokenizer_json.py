"""Conversion of the byte tokenizer and sentencepiece models to tokenizer.json.

Every text has the same ids.

A byte-pair encoding of sentencepiece gives a rank to each piece, and tokenizer.json to each pair of pieces:
all pairs that make up a piece are listed, piece by piece. Control tokens and bytes are never made by a merge.
Written as plain JSON: no library is needed.
"""

from __future__ import annotations

import base64
from typing import Any

from megalite.data.tokenizer.sentencepiece_model import ModelType, PieceType, SentencePieceModel
from megalite.data.tokenizer.structure import SPACE, byte_letters, splits
from megalite.data.tokenizer.tokenizers import BYTE_EOS, ByteTokenizer, SentencePieceTokenizer
from megalite.huggingface.files import ConversionError

Files = dict[str, dict[str, Any]]
_LONGEST = int(1e30)  # transformers' value for a tokenizer without a maximum length


def converted(tokenizer: ByteTokenizer | SentencePieceTokenizer) -> Files:
    """Return tokenizer.json and tokenizer_config.json.

    Raises ConversionError if the tokenizers library does not support the model.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return {"tokenizer.json": _of_bytes(), "tokenizer_config.json": _settings(eos_token=BYTE_EOS)}
    model = tokenizer.content
    named = {
        "bos_token": tokenizer.bos,
        "eos_token": tokenizer.eos,
        "unk_token": _first(model, PieceType.UNKNOWN),
    }
    settings = _settings(**{name: model.pieces[i] for name, i in named.items() if i is not None})
    return {"tokenizer.json": _of_sentencepiece(model), "tokenizer_config.json": settings}


def _settings(**special: str) -> dict[str, Any]:
    shared = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _LONGEST,
    }
    return {**special, **shared, "model_input_names": ["input_ids", "attention_mask"]}


def _file(model: dict[str, Any], added: list[dict[str, Any]], **rules: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", **empty, "added_tokens": added, **rules, "model": model}


def _token(i: int, content: str, special: bool) -> dict[str, Any]:
    return {
        "id": i,
        "content": content,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        "special": special,
    }


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, unk: str | None, byte_fallback: bool
) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"unk_token": unk, "fuse_unk": True, "byte_fallback": byte_fallback, "ignore_merges": False}
    return {"type": "BPE", **absent, **flags, "vocab": vocabulary, "merges": merges}


def _of_bytes() -> dict[str, Any]:
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    rules = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = _bpe(vocabulary, [], unk=None, byte_fallback=False)
    return _file(model, [_token(256, BYTE_EOS, special=True)], pre_tokenizer=rules, decoder=rules)


def _of_sentencepiece(model: SentencePieceModel) -> dict[str, Any]:
    if (
        model.whitespace_as_suffix
        or not model.escape_whitespaces
        or model.model_type not in (ModelType.BPE, ModelType.UNIGRAM)
    ):
        raise ConversionError(
            "transformers does not support this type of sentencepiece model (words, characters or suffixes)"
        )
    unknown = _first(model, PieceType.UNKNOWN)
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    added = [
        _token(i, piece, special=kind in special)
        for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind in (*special, PieceType.USER_DEFINED)
    ]
    if model.model_type == ModelType.BPE:
        vocabulary = {piece: i for i, piece in enumerate(model.pieces)}
        unk = None if unknown is None else model.pieces[unknown]
        content = _bpe(vocabulary, _merges(model), unk=unk, byte_fallback=model.byte_fallback)
    else:
        scored = list(zip(model.pieces, model.scores, strict=True))
        content = {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": model.byte_fallback,
            "vocab": scored,
        }
    return _file(content, added, normalizer=_normalizer(model), decoder=_decoder(model))


def _first(model: SentencePieceModel, kind: PieceType) -> int | None:
    return next((i for i, each in enumerate(model.types) if each == kind), None)


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    normal = [i for i, kind in enumerate(model.types) if kind == PieceType.NORMAL]
    whole = {model.pieces[i]: i for i in normal}
    ranked = sorted(normal, key=lambda i: (-model.scores[i], i))
    return [pair for i in ranked for pair in splits(model.pieces[i], whole)]


def _normalizer(model: SentencePieceModel) -> dict[str, Any]:
    """Return the normalizer: rules of the model, white space, a leading space, and the spelling of spaces."""
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
        )
    if model.remove_extra_whitespaces:
        steps += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return {
        "type": "Sequence",
        "normalizers": [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
    }


def _decoder(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
