"""Tokenizers: bytes, a sentencepiece model, or a Hugging Face tokenizer directory.

Libraries are imported by the tokenizer that needs them. `encode` adds no special tokens: the caller ends each
document with `eos`. `encode_rendered` encodes the output of a chat template, in which control tokens are
spelled out.
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.token_files import located
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.tokenizer import structure as structures
from megalite.data.tokenizer.identity import SETTINGS, place_of, tokenizer_files
from megalite.data.tokenizer.sentencepiece_model import SentencePieceModel, parse
from megalite.data.tokenizer.structure import TokenizerStructure
from megalite.families.model_config import end_ids

OPEN, CLOSE, EOS_TEXT = "\udc00", "\udc01", "\udc02"
"""Lone surrogates, which no valid text has. OPEN and CLOSE enclose text that is spelled like a control token
but is not one; EOS_TEXT is replaced by EOS."""
BYTE_EOS = "<|endoftext|>"
"""Spelling of the EOS of `byte` in an export. It has no meaning in other texts."""
USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")
"""Usual names of EOS, by which it is found in a tokenizer.json without settings."""
Placed = list[tuple[int, int, int]]
"""Tokens as (token, start, stop), where each encodes the characters [start, stop) of the text."""


class Tokenizer(Protocol):
    """The interface that preparation, generation and evaluation use.

    `decode` leaves control tokens out, and `spell` spells them.

    Attributes:
        name: the argument of `load`.
        vocab_size: number of ids, special ones included.
        unused_ids: number of ids without a token.
        eos: ends a document.
        bos: begins a text; None if the tokenizer has no such token.
        adds_bos: whether its library adds `bos` to every text.
        files: those that it was read from.
        chat_template: its own, or None.
        special_tokens: the names that a template uses → control tokens.
        controls: all texts that `encode_rendered` encodes as control tokens.
        other_templates: the names of its templates that are not the default.
        added: texts of all tokens that were added to the vocabulary.
        ends: texts of the tokens that end the model's texts by its configuration.
    """

    name: str
    vocab_size: int
    unused_ids: int
    eos: int
    bos: int | None
    adds_bos: bool
    files: list[Path]
    chat_template: str | None
    special_tokens: dict[str, Any]
    controls: list[str]
    other_templates: tuple[str, ...]
    added: list[str]
    ends: list[str]

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int] | NDArray[np.integer]]: ...

    def encode_rendered(self, text: str) -> Placed: ...

    def decode(self, ids: list[int]) -> str: ...

    def structure(self) -> TokenizerStructure: ...

    def spell(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """The token of a byte is its value; EOS is 256."""

    other_templates: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.name, self.vocab_size, self.unused_ids, self.eos, self.adds_bos = "byte", 257, 0, 256, False
        self.bos: int | None = None
        self.files: list[Path] = []
        self.chat_template, self.special_tokens = _no_chat()
        self.controls, self.added, self.ends = _only_eos()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_rendered(self, text: str) -> Placed:
        return [
            (i, at, at + 1)
            for at, one in enumerate(text)
            for i in ([self.eos] if one == EOS_TEXT else one.encode())
        ]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def structure(self) -> TokenizerStructure:
        return structures.of_bytes(BYTE_EOS)

    def spell(self, ids: list[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else b"<EOS>" for i in ids).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model file.

    The only character that does not survive a round trip is U+2581, sentencepiece's mark for a space.
    """

    other_templates: tuple[str, ...] = ()

    def __init__(self, path: Path):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError:
            raise DataError(
                f"--tokenizer {path} is not a sentencepiece model. Expected byte, a .model file, or a "
                "Hugging Face tokenizer directory."
            ) from None
        self.name, self.files, self.vocab_size, self.eos = (
            str(path),
            [path],
            self._model.vocab_size(),
            self._model.eos_id(),
        )
        self.unused_ids = 0
        if self.eos < 0:
            raise DataError(
                f"--tokenizer {path} has no end-of-sentence piece, which is required to end each document. "
                "Train it with an eos_id."
            )
        self.bos, self.adds_bos = self._model.bos_id() if self._model.bos_id() >= 0 else None, False
        self.chat_template, self.special_tokens = _no_chat()
        self.controls, self.added, self.ends = _only_eos()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.encode(texts, num_threads=1)

    def encode_rendered(self, text: str) -> Placed:
        placed_tokens: Placed = []
        at = 0
        for part in text.split(EOS_TEXT):
            encoded = self._model.encode(part, out_type="offset_mapping")
            placed_tokens += [
                (i, at + start, at + stop)
                for i, (start, stop) in zip(encoded["ids"], encoded["offsets"], strict=True)
            ]
            at += len(part) + 1
            placed_tokens.append((self.eos, at - 1, at))
        return placed_tokens[:-1]  # no EOS follows the last part

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([i for i in ids if i != self.eos])

    @property
    def content(self) -> SentencePieceModel:
        """Return the content of its file."""
        return parse(self._model.serialized_model_proto())

    def structure(self) -> TokenizerStructure:
        return structures.of_sentencepiece(self.content)

    def spell(self, ids: list[int]) -> str:
        plain = groupby(ids, self._model.is_control)
        return "".join(
            "".join(map(self._model.id_to_piece, run)) if control else self._model.decode(list(run))
            for control, run in plain
        )


class HuggingFaceTokenizer:
    """A tokenizer directory that AutoTokenizer of transformers reads, or a single tokenizer.json.

    `encode` makes no special tokens: EOS spelled out in a text does not end it.
    """

    def __init__(self, path: Path):
        self._tokenizer = _read(path)
        self._backend = _backend(self._tokenizer)
        self.name, self.eos = str(path), self._tokenizer.eos_token_id
        ids = self._tokenizer.get_vocab().values()
        self.vocab_size = max(ids) + 1  # len(tokenizer) counts tokens, whose ids may leave a gap
        self.unused_ids = self.vocab_size - len(set(ids))
        self.bos = self._tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and self._tokenizer.encode("")[:1] == [self.bos]
        self.files = tokenizer_files(path)
        template = self._tokenizer.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template
        self.other_templates = (
            tuple(sorted(template.keys() - {"default"})) if isinstance(template, dict) else ()
        )
        self.special_tokens: dict[str, Any] = self._tokenizer.special_tokens_map
        added = self._tokenizer.added_tokens_decoder
        self.controls = [token.content for token in added.values() if token.special]
        self.added = [token.content for token in added.values()]
        self.ends = [added[i].content for i in _end_ids(path) if i in added]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the object of transformers, whose import takes seconds.

        Workers can encode but not decode.
        """
        return {**self.__dict__, "_tokenizer": None} if self._backend is not None else self.__dict__

    def encode_rendered(self, text: str) -> Placed:
        """Encode a rendered text. Text between OPEN and CLOSE never becomes a control token.

        Raises DataError if the tokenizer has no offsets.
        """
        if self._backend is None and not self._tokenizer.is_fast:
            raise DataError(
                f"--tokenizer {self.name} does not support offsets, which chat data requires. Use a "
                "tokenizer with a tokenizer.json."
            )
        placed_tokens: Placed = []
        at = 0
        for number, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", text)):
            placed = zip(*self._with_offsets(part, plain=number % 2 == 1), strict=True)
            placed_tokens += [(token, at + start, at + stop) for token, (start, stop) in placed]
            at += len(part) + 1
        return placed_tokens

    def _with_offsets(self, text: str, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return tokens and their character offsets.

        Args:
            plain: the text contains no control tokens.
        """
        if self._backend is None:
            options = {"add_special_tokens": False, "split_special_tokens": plain, "verbose": False}
            encoded = self._tokenizer(text, return_offsets_mapping=True, **options)
            return encoded["input_ids"], encoded["offset_mapping"]
        self._backend.encode_special_tokens = plain
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._backend is None:
            return [
                self._tokenizer.encode(
                    text, add_special_tokens=False, split_special_tokens=True, verbose=False
                )
                for text in texts
            ]
        self._backend.encode_special_tokens = True
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def structure(self) -> TokenizerStructure:
        pieces = self._tokenizer.get_vocab()
        if self._tokenizer.is_fast:
            return structures.of_tokenizer_json(
                json.loads(self._tokenizer.backend_tokenizer.to_str()), pieces
            )
        special = {
            i: "" for i, token in sorted(self._tokenizer.added_tokens_decoder.items()) if token.special
        }
        return TokenizerStructure(structures.spelled(pieces), special, [])

    def spell(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _read(path: Path) -> Any:
    """Load a tokenizer with transformers. Raises DataError if there is none, or if it has no EOS."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # preparation runs several workers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    alone = path.is_file()
    try:
        tokenizer: Any = (
            PreTrainedTokenizerFast(tokenizer_file=str(path))
            if alone
            else AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        )
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError and others for files that it cannot read
        what = "a tokenizer.json" if alone else "a tokenizer directory"
        raise DataError(
            f"Could not load --tokenizer {path} as {what} with transformers: {_first_line(error)}."
        ) from None
    if tokenizer.eos_token_id is None and (alone or not (path / SETTINGS).is_file()):
        usual = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.content in USUAL_EOS
        ]
        if len(usual) == 1:
            tokenizer.eos_token = usual[0]
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"--tokenizer {path} has no eos_token, which is required to end each document. Set it in "
            f"{SETTINGS} next to tokenizer.json."
        )
    return tokenizer


def _backend(tokenizer: Any) -> Any:
    """Return a copy of the wrapped tokenizer of the `tokenizers` library.

    It gives the same tokens in less time, and a process can use it without importing transformers. The result
    is None if there is none, or if the class in transformers changes texts.
    """
    from transformers import PreTrainedTokenizerFast as Base

    if not isinstance(tokenizer, Base):
        return None
    if any(
        getattr(type(tokenizer), name) is not getattr(Base, name)
        for name in ("__call__", "encode", "_encode_plus")
    ):
        return None
    copied = copy.deepcopy(tokenizer.backend_tokenizer)
    copied.no_truncation()  # both may be stored in tokenizer.json
    copied.no_padding()
    return copied


def _end_ids(path: Path) -> list[int]:
    """Return the EOS ids in a model's directory; empty if its configuration cannot be read."""
    try:
        return end_ids(path)
    except ConfigError:
        return []


def _no_chat() -> tuple[str | None, dict[str, Any]]:
    """Return chat template and special tokens of a tokenizer whose only control token is EOS."""
    return None, {"bos_token": "", "eos_token": EOS_TEXT}


def _only_eos() -> tuple[list[str], list[str], list[str]]:
    """Return `controls`, `added` and `ends` of such a tokenizer.

    A text cannot spell its EOS, so `controls` does not contain it.
    """
    return [], [EOS_TEXT], [EOS_TEXT]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def load(name: str | Path) -> Tokenizer:
    """Load `byte`, a sentencepiece FILE.model, a tokenizer.json, or a Hugging Face directory.

    Raises DataError if it does not exist.
    """
    path = Path(place_of(name))
    if str(name) == "byte":
        return ByteTokenizer()
    if path.is_dir() or path.suffix == ".json" and path.is_file():
        return HuggingFaceTokenizer(path)
    if path.is_file():
        return SentencePieceTokenizer(path)
    raise DataError(
        f"--tokenizer {name} does not exist. Expected byte, a sentencepiece FILE.model, a tokenizer.json, "
        "or a Hugging Face tokenizer directory."
    )


def load_for(prefix: str | Path) -> Tokenizer:
    """Load the tokenizer of a token file, as named in PREFIX.json.

    A relative name is relative to the directory of PREFIX.
    """
    name = IndexedTokens(prefix).metadata.get("tokenizer")
    if name is None:
        raise DataError(
            f"{prefix}.json does not specify a tokenizer. Prepare the data with `megalite prepare`, or pass "
            "the tokenizer explicitly."
        )
    return load(name if name == "byte" else Path(located(prefix)).parent / name)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a BPE model that decodes every text exactly, including white space, and write it to `path`.

    Text is not normalized, runs of spaces are pieces, and characters without a piece fall back to bytes. The
    model depends on the texts only.
    """
    import sentencepiece

    try:
        with path.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_passages(texts),
                model_writer=writer,
                model_type="bpe",
                vocab_size=vocab_size,
                max_sentence_length=4 * PASSAGE,
                character_coverage=0.9999,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
                num_threads=1,  # stored in the model file: another number would change the file
                minloglevel=2,
            )
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        reason = _first_line(error).rpartition("] ")[2] or "the input contains no text"
        raise DataError(
            f"Failed to train a tokenizer with --train_tokenizer {vocab_size}: {reason}"
        ) from None


PASSAGE = 4096  # characters; sentencepiece skips longer sentences


def _passages(texts: Iterable[str]) -> Iterator[str]:
    """Yield passages of whole lines with their newlines, so that pieces such as ")\\n" are learned across
    lines."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + PASSAGE
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            yield text[start:end]
            start = end
