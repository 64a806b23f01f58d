"""The keys of a GGUF file that describe the tokenizer, from the files of an export
(`huggingface.tokenizer_export`).

llama.cpp has two kinds of tokenizers that fit: byte-level byte-pair encodings with a pre-tokenizer that it
knows by name (`gpt2`), and sentencepiece's byte-pair encodings (`llama`). Its unigram models have no pieces
of bytes, and are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.tokenizer.identity import SETTINGS, TOKENIZER_JSON
from megalite.data.tokenizer.sentencepiece_model import ModelType, PieceType, SentencePieceModel, parse
from megalite.data.tokenizer.structure import BYTE_PIECES, of_tokenizer_json, spelled
from megalite.gguf.pretokenizers import PRETOKENIZERS, name_of
from megalite.huggingface.files import ConversionError
from megalite.huggingface.tokenizer_export import TEMPLATE

SENTENCEPIECE = "tokenizer.model"
NO_MERGE = "[NONE] [NONE]"
"""A merge that never applies: llama.cpp needs at least one."""
Json = dict[str, Any]


@dataclass
class Vocabulary:
    """What a file says of a tokenizer.

    Attributes:
        model: gpt2 or llama.
        tokens, types: spelling and type of each id.
        scores: of a sentencepiece model.
        merges: of a byte-level model.
        pre: name of its pre-tokenizer.
        space_prefix: whether a space is added at the start of a text.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str = "default"
    space_prefix: bool | None = None

    def keys(self, size: int) -> Json:
        """Return the keys, with unused tokens up to the vocabulary size of the model."""
        missing = range(len(self.tokens), size)
        keys: Json = {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": [*self.tokens, *(f"[PAD{i}]" for i in missing)],
            "tokenizer.ggml.token_type": [*self.types, *(int(PieceType.UNUSED) for _ in missing)],
        }
        if self.model == "gpt2":
            keys["tokenizer.ggml.merges"] = self.merges or [NO_MERGE]
        else:
            keys["tokenizer.ggml.scores"] = [*self.scores, *(0.0 for _ in missing)]
        if self.space_prefix is not None:
            keys["tokenizer.ggml.add_space_prefix"] = self.space_prefix
        return keys


def tokenizer_keys(
    directory: Path, size: int, ids: Json, model: SentencePieceModel | None, pre: str | None
) -> Json:
    """Return the keys of the tokenizer in a directory.

    Args:
        size: vocabulary size of the model.
        ids: its bos_token_id, eos_token_id and pad_token_id.
        model: the sentencepiece model that its files were converted from, if they were.
        pre: name of the pre-tokenizer of a byte-level model; None: it is recognized by its rules.

    Raises:
        ConversionError: llama.cpp has no tokenizer like this one, or none with this name.
    """
    settings = _json(directory / SETTINGS)
    content = _json(directory / TOKENIZER_JSON)
    path = directory / SENTENCEPIECE
    if model is None and path.is_file():
        model = _parsed(path)
    if model is not None:
        vocabulary = of_sentencepiece(model, str(path))
        _add(vocabulary, content.get("added_tokens") or [], settings.get("added_tokens_decoder") or {})
    elif content:
        vocabulary = of_json(content, directory / TOKENIZER_JSON, pre)
    else:
        raise ConversionError(
            f"{directory} has neither {TOKENIZER_JSON} nor {SENTENCEPIECE}, from which a GGUF file takes "
            "its tokenizer. Pass another one with --tokenizer."
        )
    if pre is not None and vocabulary.model != "gpt2":
        raise ConversionError(
            f"--pre {pre}: the tokenizer is one of sentencepiece, which has no pre-tokenizer. Omit the "
            "option."
        )
    return (
        vocabulary.keys(size) | _special(ids, settings, content, vocabulary) | _templates(directory, settings)
    )


def _json(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        return content
    except ValueError as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from None


def _parsed(path: Path) -> SentencePieceModel:
    try:
        return parse(path.read_bytes())
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        raise ConversionError(f"{path} is not a sentencepiece model ({error})") from None


# ---- sentencepiece


def of_sentencepiece(model: SentencePieceModel, name: str) -> Vocabulary:
    """Return the vocabulary of a sentencepiece model of type BPE."""
    kinds = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE, PieceType.USER_DEFINED, PieceType.UNUSED)
    types = [int(kind) if kind in kinds else int(PieceType.NORMAL) for kind in model.types]
    if model.model_type != ModelType.BPE or model.whitespace_as_suffix:
        raise _unsupported(
            name, "is a sentencepiece model of another type than bpe, or has spaces as suffixes"
        )
    _check(name, bool(model.charsmap), model.remove_extra_whitespaces, PieceType.BYTE in types)
    vocabulary = Vocabulary("llama", list(model.pieces), types, list(model.scores))
    vocabulary.space_prefix = model.add_dummy_prefix
    return vocabulary


def _check(name: str, charsmap: bool, strips: bool, has_bytes: bool) -> None:
    """Raise ConversionError if a tokenizer of sentencepiece has rules that llama.cpp does not have."""
    if charsmap:
        raise _unsupported(name, "normalizes characters")
    if strips:
        raise _unsupported(name, "removes spaces (remove_extra_whitespaces)")
    if not has_bytes:
        raise _unsupported(name, "has no pieces of bytes (byte_fallback)")


def _unsupported(name: str, what: str) -> ConversionError:
    return ConversionError(
        f"{name} {what}, which llama.cpp's tokenizers for language models do not support. Export to "
        "safetensors "
        "instead, without --format gguf."
    )


def _add(vocabulary: Vocabulary, added: Sequence[Json], decoder: Json) -> None:
    """Add the tokens that the files of transformers have besides the pieces of a sentencepiece model."""
    tokens = {int(i): token for i, token in decoder.items()} | {token["id"]: token for token in added}
    for i in sorted(tokens):
        content, special = tokens[i]["content"], tokens[i].get("special", False)
        kind = PieceType.CONTROL if special else PieceType.USER_DEFINED
        while len(vocabulary.tokens) <= i:
            vocabulary.tokens.append(f"[PAD{len(vocabulary.tokens)}]")
            vocabulary.types.append(int(PieceType.UNUSED))
            vocabulary.scores.append(0.0)
        if vocabulary.types[i] != PieceType.UNKNOWN:
            vocabulary.tokens[i], vocabulary.types[i] = content, int(kind)


# ---- tokenizer.json


def of_json(content: Json, path: Path, pre: str | None) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json."""
    try:
        model = content["model"]
        kind = model.get("type", "BPE" if "merges" in model else "WordPiece")
        steps = list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
        rules = list(_steps(content.get("normalizer"), "normalizers"))
        if kind == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
            return _byte_level(content, rules, steps, path, pre)
        if kind == "BPE" and model.get("byte_fallback"):
            return _byte_fallback(content, rules, steps, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is damaged: {type(error).__name__} {error}") from None
    raise _unsupported(str(path), f"is of type {kind}, or has no bytes")


def _steps(entry: Json | None, inner: str) -> Iterator[Json]:
    """Yield the steps of a normalizer or pre-tokenizer, without the sequences that contain them."""
    if entry is None:
        return
    if entry["type"] == "Sequence":
        for each in entry[inner]:
            yield from _steps(each, inner)
    else:
        yield entry


def _vocabulary(content: Json, model: str, pieces: dict[str, int]) -> Vocabulary:
    added = content.get("added_tokens") or []
    pieces = pieces | {token["content"]: token["id"] for token in added}
    tokens = spelled(pieces)
    special = {token["id"]: bool(token.get("special")) for token in added}
    types = [int(PieceType.NORMAL if token else PieceType.UNUSED) for token in tokens]
    for i, token in enumerate(tokens):
        if model != "gpt2" and token in BYTE_PIECES:
            types[i] = int(PieceType.BYTE)
        if i in special:
            types[i] = int(PieceType.CONTROL if special[i] else PieceType.USER_DEFINED)
    named = [token or f"[PAD{i}]" for i, token in enumerate(tokens)]
    return Vocabulary(model, named, types)


def _byte_level(
    content: Json, rules: list[Json], steps: list[Json], path: Path, pre: str | None
) -> Vocabulary:
    if others := [rule["type"] for rule in rules if rule["type"] != "NFC"]:
        raise _unsupported(str(path), f"has the normalizer {others[0]}")
    model = content["model"]
    vocabulary = _vocabulary(content, "gpt2", model["vocab"])
    vocabulary.merges = [
        each if isinstance(each, str) else " ".join(each) for each in model.get("merges") or []
    ]
    known = name_of(steps, bool(model.get("ignore_merges")), bool(vocabulary.merges))
    if pre is None and known is None:
        shown = json.dumps(
            [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
        )
        raise ConversionError(
            f"{path} has a pre-tokenizer that is none of those that llama.cpp has under the names "
            f"{', '.join(PRETOKENIZERS)}: {shown}, ignore_merges {bool(model.get('ignore_merges'))}. If "
            "llama.cpp "
            "has it under another name, pass this name with --pre NAME."
        )
    vocabulary.pre = pre or str(known)
    return vocabulary


def _byte_fallback(content: Json, rules: list[Json], steps: list[Json], path: Path) -> Vocabulary:
    """Return a byte-pair encoding of sentencepiece, the ranks of whose pieces become scores."""
    vocabulary = _vocabulary(content, "llama", content["model"]["vocab"])
    _, *ranked = of_tokenizer_json(content, content["model"]["vocab"]).rules
    merges = content["model"].get("merges") or []
    if len(ranked) == len(merges) and not {*ranked} <= {*vocabulary.tokens}:
        raise _unsupported(str(path), "ranks pairs of pieces with byte_fallback")
    ranks = {piece: number for number, piece in enumerate(ranked)}
    vocabulary.scores = [-float(ranks.get(token, 0)) for token in vocabulary.tokens]
    unknown = content["model"].get("unk_token")
    if unknown in vocabulary.tokens:
        vocabulary.types[vocabulary.tokens.index(unknown)] = int(PieceType.UNKNOWN)
    vocabulary.space_prefix = _space_prefix(rules, steps)
    kinds = {rule["type"] for rule in rules} - {"Prepend", "Replace"}
    _check(str(path), bool(kinds - {"Strip"}), "Strip" in kinds, PieceType.BYTE in vocabulary.types)
    return vocabulary


def _space_prefix(rules: list[Json], steps: list[Json]) -> bool:
    if any(rule["type"] == "Prepend" for rule in rules):
        return True
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), {})
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space") else "never")
    return scheme in ("first", "always")


# ---- special tokens and templates


def _special(ids: Json, settings: Json, content: Json, vocabulary: Vocabulary) -> Json:
    ends = ids.get("eos_token_id")
    eos, *others = ends if isinstance(ends, list) else [ends]
    number = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == PieceType.UNKNOWN), None)
    unk = settings.get("unk_token")
    if isinstance(unk, dict):
        unk = unk.get("content")
    bos = ids.get("bos_token_id")
    return {
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.eot_token_id": next(iter(others), None),
        "tokenizer.ggml.padding_token_id": ids.get("pad_token_id"),
        "tokenizer.ggml.unknown_token_id": number.get(str(unk), unknown),
        "tokenizer.ggml.add_bos_token": _adds_bos(settings, content, vocabulary.tokens, bos),
        "tokenizer.ggml.add_eos_token": False,
    }


def _adds_bos(settings: Json, content: Json, tokens: list[str], bos: int | None) -> bool:
    """Return whether the tokenizer begins every text with BOS: by its settings, or by its template."""
    if bos is None or bos >= len(tokens):
        return False
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    for step in _steps(content.get("post_processor"), "processors"):
        first: Json = next(iter(step.get("single") or []), {})
        if step["type"] == "TemplateProcessing" and first.get("SpecialToken", {}).get("id") == tokens[bos]:
            return True
    return False


def _templates(directory: Path, settings: Json) -> Json:
    path = directory / TEMPLATE
    template = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    return {"tokenizer.chat_template": template} if template else {}
