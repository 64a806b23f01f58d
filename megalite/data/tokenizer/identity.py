"""Identity of the tokenizer of data, weights or an export, by a fingerprint of its behavior.

Tokenizers that give every text the same ids have one fingerprint, whatever their files are: a sentencepiece
model and the tokenizer.json made of it, vocab.json with merges.txt and tokenizer.json, files of other
versions of the tokenizers library. It covers

- the piece of every id, and which ids are control tokens,
- merges in their order (byte-pair encoding) or scores (unigram), in the form of `structure`,
- the ids of fixed probe texts, of the text of every piece, and of the spelling of every control token inside
  a text. That is how normalization, splitting into words, byte fallback and unknown characters are compared:
  files describe them in too many ways.

It does not cover the chat template, which has its own hash; which ids are EOS and BOS; decoding; and white
space at the very beginning of a text, where the same files give different ids in different versions of
transformers.

`digest` identifies the files: tokenizers with equal files are equal, and no library has to read them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.errors import ConfigError
from megalite.config.token_files import located, metadata

if TYPE_CHECKING:
    from megalite.data.tokenizer.structure import TokenizerStructure
    from megalite.data.tokenizer.tokenizers import Tokenizer

TEMPLATES = "additional_chat_templates"
"""The folder in which transformers stores the chat templates of a tokenizer that are not the default."""
FILES = "tokenizer* vocab* merges* special_tokens_map.json added_tokens.json chat_template.* spiece.model"
FILES += f" {TEMPLATES}/*.jinja"
"""Patterns of the files of a Hugging Face tokenizer."""
TOKENIZER_JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
"""Files of a Hugging Face tokenizer, and its settings, such as the EOS token."""
ENTRY = "megalite.json"
"""The file of an export in which its tokenizer is recorded."""
VERSION = "1"
"""Version of the fingerprint. Fingerprints of different versions cannot be compared."""
PROBES = (
    "The quick brown fox's 12 don't, they'LL we've I'm O'Neill—“quoted” text; e.g. U.S.A. 3.14159, 1,000,000 "
    "and 1234567890 12:34:56.",
    "a  b   c    d     e\tf\t\tg\nh\n\ni\n\n\nj\r\nk \n l\n  m\n    n\n        o  \n\n    p\t\n",
    "def f(x: int = 0) -> str:\n    return f'{x!r:>10}' if x != 0x1F else \"\\n\"  # {[(<>)]} && || ** // == "
    "<= += $a @b ~c `d`\n",
    "Grüße, naïve façade, Ærøskøbing, İstanbul, ǅ, ﬁ ﬀ, e\u0301 vs \u00e9, ½ ² Ⅷ ﷺ "
    "ＡＢＣ\u3000full\u00a0width\u2003em\u200bzero\u2028z",
    "Русский текст, Ελληνικά, עברית, العربية ١٢٣, हिन्दी १२३, ไทย, 日本語のテキスト、中文字符。한국어, አማርኛ, \ufeff 𝔘𝔫𝔦 "
    "\U0010fffd",
    '🎉 👍🏽 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 x="</s>" <s> <unk> <pad> <0x0A> <|endoftext|>',
    "<|im_start|>user<|im_end|> [INST] [CLS] <think> <|eot_id|> <bos> <|user|> \u2581 Ġ Ċ ## @@ "
    "\x00\x01\x7f\x1b[0m",
    *(
        f"x{letter * count}"
        for letter in (" ", "\n", "\t", "-", "=", "a", "0", "é", "中")
        for count in (2, 3, 5, 7, 16, 33, 100)
    ),
    *(word for word in ("a", "A", "1", "é", "Hello", "hello world", "x ", "x\n", "x\t", "")),
)
"""Texts that tokenizers treat differently. None begins with white space."""
TOGETHER = 256  # pieces of the vocabulary in one probe


@dataclass(frozen=True)
class TokenizerIdentity:
    """Recorded identity of a tokenizer.

    Attributes:
        name: byte, or the path of its files when it was recorded; None if unknown.
        fingerprint: None if it is unknown or not computed.
        digest: hash of its files; None if unknown.
        template_hash: hash of the chat template that conversations were rendered with, or None.
        readable: `name` is the tokenizer itself, not a record of it, so a missing fingerprint can be
            computed.
    """

    name: str | None = None
    fingerprint: str | None = None
    digest: str | None = None
    template_hash: str | None = None
    readable: bool = False

    @property
    def can_be_known(self) -> bool:
        """Whether there is a fingerprint, or one can be computed."""
        return (
            self.fingerprint is not None or self.name == "byte" or (self.readable and self.name is not None)
        )

    def known(self) -> str | None:
        """Return the fingerprint, which is computed if it is not stored, or None if it is unknown.

        Raises DataError if files cannot be read.
        """
        if self.fingerprint is None and self.name is not None and self.can_be_known:
            return fingerprint_of(self.name, self.digest)
        return self.fingerprint

    def is_same(self, other: TokenizerIdentity) -> bool | None:
        """Return whether both tokenizers are the same, or None if that is unknown.

        Raises DataError as `known`.
        """
        if self.digest is not None and self.digest == other.digest:
            return True
        if not (self.can_be_known and other.can_be_known):
            return None
        one, two = self.known() or "", other.known() or ""
        return one == two if one.partition("-")[0] == two.partition("-")[0] else None

    def record(self) -> dict[str, str | None]:
        """Return the identity as JSON data, for a checkpoint or an export. Nothing is computed."""
        return {key: value for key, value in asdict(self).items() if key != "readable"}


def of_record(record: Mapping[str, Any] | None) -> TokenizerIdentity:
    """Return the identity of a record, which is unknown without a record."""
    record = record or {}
    name, fingerprint, digest, template_hash = (
        record.get(key) for key in ("name", "fingerprint", "digest", "template_hash")
    )
    return TokenizerIdentity(name, fingerprint, digest, template_hash)


def of_tokenizer(name: str | Path) -> TokenizerIdentity:
    """Return the current identity of `byte`, FILE.model, tokenizer.json or a Hugging Face directory.

    The fingerprint is that of a megalite.json next to unchanged files, else it is computed when it is needed.
    Of a directory without a tokenizer only what megalite.json records is known.
    """
    name = place_of(name)
    files, recorded = tokenizer_files(name), _entry(Path(name))
    if str(name) != "byte" and not files:
        return recorded
    digest = digest_of(name, files)
    return TokenizerIdentity(
        _absolute(name), recorded.fingerprint if recorded.digest == digest else None, digest, readable=True
    )


def _entry(directory: Path) -> TokenizerIdentity:
    """Return the identity that an export records."""
    try:
        return of_record(json.loads((directory / ENTRY).read_text(encoding="utf-8")).get("tokenizer"))
    except (OSError, ValueError, AttributeError):
        return TokenizerIdentity()


def of_token_file(prefix: str | Path) -> TokenizerIdentity:
    """Return the identity of the tokenizer of a token file, as recorded in PREFIX.json.

    Raises ConfigError if PREFIX.json is broken.
    """
    facts = metadata(prefix)
    name = facts.get("tokenizer")
    place = name if name in (None, "byte") else _absolute(Path(located(prefix)).parent / name)
    template = facts["chat"].get("template_hash") if isinstance(facts.get("chat"), dict) else None
    return TokenizerIdentity(
        place, facts.get("tokenizer_fingerprint"), facts.get("tokenizer_digest"), template
    )


def _absolute(name: str | Path) -> str:
    return "byte" if str(name) == "byte" else str(Path(name).resolve())


def place_of(name: str | Path) -> str | Path:
    """Return the name of a tokenizer.

    A tokenizer.json with settings next to it is replaced by its directory.
    """
    path = Path(name)
    has_settings = path.name == TOKENIZER_JSON and path.is_file() and path.with_name(SETTINGS).is_file()
    return path.parent if has_settings else name


def tokenizer_files(name: str | Path) -> list[Path]:
    """Return the sorted files of a tokenizer; empty if there are none.

    Args:
        name: `byte`, FILE.model, tokenizer.json or a Hugging Face directory.
    """
    path = Path(name)
    if str(name) == "byte" or not path.is_dir():
        return [path] if path.is_file() else []
    return sorted({file for pattern in FILES.split() for file in path.glob(pattern) if file.is_file()})


def copy_tokenizer(name: str | Path, target: Path) -> None:
    """Copy the files of a tokenizer into a directory."""
    for file in tokenizer_files(name):
        copied = target / _place_of(file, name)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)


def _place_of(file: Path, name: str | Path) -> str:
    """Return the name of a file relative to the directory of the tokenizer."""
    return file.relative_to(name).as_posix() if Path(name).is_dir() else file.name


def digest_of(name: str | Path, files: list[Path]) -> str:
    """Return a hash of a tokenizer's files.

    It includes the model_type of a config.json next to them, which AutoTokenizer reads.
    """
    digest = sha256(b"byte" if str(name) == "byte" else b"")
    for path in files:
        content = path.read_bytes()
        own = _place_of(path, name) if Path(name).is_dir() else ""
        digest.update(f"{own}:{len(content)}:".encode() + content)
    config = Path(name) / "config.json"
    if config.is_file():
        try:
            digest.update(str(json.loads(config.read_bytes()).get("model_type")).encode())
        except (ValueError, AttributeError):
            raise ConfigError(
                f"{config} is not a JSON object. Expected the directory of a tokenizer or a model."
            ) from None
    return digest.hexdigest()[:32]


@cache
def fingerprint_of(name: str, digest: str | None) -> str:
    """Return the fingerprint of the tokenizer with these files, computed once for each content.

    Raises DataError if the files cannot be read.
    """
    # training needs it only where it cannot rely on what is recorded
    from megalite.data.tokenizer.tokenizers import load

    return fingerprint(load(name))


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the fingerprint of a tokenizer."""
    structure = tokenizer.structure()
    digest = sha256()
    for part in (structure.pieces, sorted(structure.special.items()), structure.rules):
        digest.update(json.dumps(part).encode() + b"\n")
    for text in probes(structure):
        digest.update(json.dumps(tokenizer.encode(text)).encode() + b"\n")
    return f"{VERSION}-{digest.hexdigest()[:32]}"


def probes(structure: TokenizerStructure) -> Iterator[str]:
    """Yield the texts of the fingerprint: PROBES, and all pieces and control tokens of the vocabulary."""
    yield from PROBES
    texts = structure.texts()
    for start in range(0, len(texts), TOGETHER):
        yield "\n".join(["x", *texts[start : start + TOGETHER]])
    for i in structure.special:
        yield f"x{structure.pieces[i]}y {structure.pieces[i]} z"
