"""Export of the tokenizer that the weights were trained with, in transformers' format.

A Hugging Face tokenizer's files are copied; bytes and a sentencepiece model are converted (`tokenizer_json`).
The chat template is the one that the conversations were rendered with, and the token with which it ends the
assistant's turn is among the ids that end a generation.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import megalite
from megalite.checkpoint import Manifest
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.config.token_files import metadata, prefixes
from megalite.data.chat.template import ChatTemplate, template_hash
from megalite.data.indexed import DataError
from megalite.data.tokenizer.comparison import Tokenized, compare
from megalite.data.tokenizer.identity import (
    ENTRY,
    SETTINGS,
    TEMPLATES,
    TOKENIZER_JSON,
    TokenizerIdentity,
    copy_tokenizer,
    digest_of,
    fingerprint,
    of_token_file,
    of_tokenizer,
    tokenizer_files,
)
from megalite.data.tokenizer.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load,
)
from megalite.families.model_config import hf_config
from megalite.huggingface.companions import GENERATION, check_vocabulary, recorded_tokenizer
from megalite.huggingface.files import ConversionError
from megalite.huggingface.tokenizer_json import converted
from megalite.system.files import write_synced

ALLOW = "--allow_tokenizer_change"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class TokenizerChoice:
    """The user's choice of a tokenizer.

    Attributes:
        named: byte, FILE.model or a directory.
        like: a model's directory, whose tokenizer is chosen.
        allow_change: accept it even if the weights were trained with another.
    """

    named: str | None = None
    like: Path | None = None
    allow_change: bool = False


@dataclass
class ExportedTokenizer:
    """The tokenizer of an export.

    Attributes:
        identity: the tokenizer that the weights were trained with, as far as it is known, or the chosen one.
        name: byte, FILE.model or a directory. None: the export has no tokenizer.
        tokenizer: loaded if the weights were trained on data. None: its files are only copied.
        template: the chat template of the training data. None: the tokenizer's own.
        reader: the class of transformers that reads it; for some types of models not AutoTokenizer.
        notes: lines for the user.
    """

    identity: TokenizerIdentity
    name: str | None = None
    tokenizer: Tokenizer | None = None
    template: str | None = None
    reader: str = "AutoTokenizer"
    notes: list[str] = field(default_factory=list)

    def end_of_turn(self) -> list[int]:
        """Return the token that ends the assistant's messages in the training data; empty if none does."""
        if self.template is not None and self.tokenizer is not None:
            with suppress(DataError):  # a template in which the end of a turn cannot be located
                end = ChatTemplate(self.tokenizer, self.template).end_of_turn()
                return [] if end is None else [end]
        return []


def choose(manifest: Manifest, choice: TokenizerChoice, origin: Path | None) -> ExportedTokenizer:
    """Choose the tokenizer to export with a checkpoint.

    Args:
        origin: the directory of the model that the weights came from.

    Raises:
        ConfigError: the chosen tokenizer is not the one that the weights were trained with, or has ids that
            the model does not have.
    """
    config = from_dict(manifest.state["config"])
    trained = [] if config.data.train is None else prefixes(config.data.train)
    exported = _chosen(manifest, choice, origin, trained)
    if exported.name is None:
        return exported
    if trained or choice.named or not Path(exported.name).is_dir():
        exported.template = _template(exported, trained, recorded_tokenizer(manifest).template_hash)
        try:
            exported.tokenizer = load(exported.name)
        except ImportError as error:
            exported.notes.append(
                f"{error.name} is not installed, so the special token ids and the chat template are taken "
                f"from {exported.name}"
            )
    _check_size(exported, config.model.vocabulary)
    return exported


def _chosen(
    manifest: Manifest, choice: TokenizerChoice, origin: Path | None, trained: list[str]
) -> ExportedTokenizer:
    """Return the chosen tokenizer, otherwise the recorded one or the same one in the original directory."""
    recorded = recorded_tokenizer(manifest)
    like = str(choice.like) if choice.like and tokenizer_files(choice.like) else None
    requested = choice.named or like
    if requested is not None:
        identity = of_tokenizer(requested)
        what = Tokenized(f"{'--tokenizer' if choice.named else '--like'} {requested}", identity, itself=True)
        way_out = "Omit the option to use the tokenizer that the model was trained with"
        weights = Tokenized(str(manifest.directory), recorded)
        notes = compare(what, weights, allow=choice.allow_change, way_out=way_out, option=ALLOW)
        return ExportedTokenizer(identity, requested, notes=notes)
    if not recorded.can_be_known and trained:
        # of now, which may not be what it was
        recorded = replace(of_token_file(trained[0]), fingerprint=None, digest=None)
    for name in (recorded.name, None if origin is None else str(origin)):
        if name is not None and (name == "byte" or tokenizer_files(name)):
            identity = of_tokenizer(name)
            same = _is_same(identity, recorded)
            if same or (same is None and not recorded.can_be_known):
                return ExportedTokenizer(
                    replace(identity, fingerprint=identity.fingerprint or recorded.fingerprint), name
                )
    why = (
        f"{recorded.name} could not be read or has changed"
        if recorded.name
        else "the checkpoint does not record one"
    )
    return ExportedTokenizer(
        recorded, notes=[f"the export does not include a tokenizer, because {why}. Pass it with --tokenizer."]
    )


def _is_same(one: TokenizerIdentity, other: TokenizerIdentity) -> bool | None:
    try:
        return one.is_same(other)
    except (ConfigError, ImportError):
        return False


def _template(exported: ExportedTokenizer, trained: list[str], expected: str | None) -> str | None:
    """Return the chat template of the training data, or None for texts.

    Args:
        expected: its recorded hash.
    """
    chats = [metadata(prefix).get("chat") for prefix in trained]
    templates = [
        chat["template"] for chat in chats if isinstance(chat, dict) and isinstance(chat.get("template"), str)
    ]
    same = [each for each in templates if expected in (None, template_hash(each))]
    if expected is not None and not same:
        exported.notes.append(
            f"the chat template that the model was trained with (hash {expected}) was not found in the "
            "files of the data"
        )
    return next(iter(same), None)


def _check_size(exported: ExportedTokenizer, vocabulary: int) -> None:
    name = exported.name or ""
    if Path(name).is_dir():
        check_vocabulary(Path(name), vocabulary)
    elif exported.tokenizer is not None and exported.tokenizer.vocab_size > vocabulary:
        raise ConversionError(
            f"{name} has {exported.tokenizer.vocab_size} tokens, more than vocab_size={vocabulary} of the "
            "model. Use the tokenizer of the model."
        )


# ---- ids


def token_ids(exported: ExportedTokenizer, config: Config, base: Path | None) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id, which are None if there is no such token.

    eos_token_id is a list if several tokens end a text.

    Args:
        base: the directory that the weights came from, whose ids hold if its tokenizer is the one that is
            exported.
    """
    tokenizer = exported.tokenizer
    shape = {} if base is None else hf_config(base)
    if tokenizer is None:
        eos = next((metadata(prefix).get("eos") for prefix in prefixes(config.data.train)), None)
        own = {name: shape.get(name) for name in IDS}
        theirs = own["eos_token_id"]
        known = eos is None or eos == theirs or (isinstance(theirs, list) and eos in theirs)
        # the documents that it was trained on ended in this one
        return own | ({} if known else {"eos_token_id": eos})
    own = {name: (shape | _settings(base)).get(name) for name in IDS}
    if base is None or exported.name is None or not _is_same(of_tokenizer(base), of_tokenizer(exported.name)):
        own = dict.fromkeys(IDS)
    given = own["eos_token_id"]
    ends = [
        *(given if isinstance(given, list) else [] if given is None else [given]),
        tokenizer.eos,
        *exported.end_of_turn(),
    ]
    ends = list(dict.fromkeys(ends))
    pad = tokenizer.special_tokens.get("pad_token")
    pieces = tokenizer.structure().pieces if own["pad_token_id"] is None and pad else []
    return {
        "bos_token_id": own["bos_token_id"] if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": pieces.index(pad) if pad in pieces else own["pad_token_id"],
    }


def _settings(base: Path | None) -> dict[str, Any]:
    return hf_config(base, GENERATION) if base is not None and (base / GENERATION).is_file() else {}


def write_generation(
    directory: Path, exported: ExportedTokenizer, base: Path | None, ids: dict[str, Any]
) -> None:
    """Write generation_config.json.

    It contains the settings of the original model, with the ids that the tokenizer determines.
    """
    if exported.tokenizer is not None:
        content = _settings(base) | {name: value for name, value in ids.items() if value is not None}
        write_synced(directory / GENERATION, json.dumps(content, indent=2) + "\n")
    elif base is not None and (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, directory / GENERATION)


# ---- files


def write_tokenizer(directory: Path, exported: ExportedTokenizer, step: int) -> TokenizerIdentity | None:
    """Write the tokenizer's files, its template, and megalite.json with its identity.

    It is noted if transformers, which reads config.json too, does not read the same tokenizer from them.

    Returns:
        the identity, or None without a tokenizer.
    """
    identity = exported.identity
    if exported.name is not None:
        if isinstance(exported.tokenizer, ByteTokenizer | SentencePieceTokenizer):
            _convert(directory, exported)
        else:
            _copy(directory, exported)
        _write_template(directory, exported)
        identity = _checked(directory, exported)
    if exported.template is not None:
        identity = replace(identity, template_hash=template_hash(exported.template))
    entry = {"megalite": megalite.__version__, "step": step, "tokenizer": identity.record()}
    write_synced(directory / ENTRY, json.dumps(entry, indent=2) + "\n")
    return identity if exported.name is not None else None


def _copy(directory: Path, exported: ExportedTokenizer) -> None:
    """Copy the files.

    A tokenizer.json without settings gets some, which name its EOS and the class that reads it alone.
    """
    name = exported.name or ""
    if Path(name).is_dir():
        copy_tokenizer(name, directory)
    else:
        shutil.copyfile(name, directory / TOKENIZER_JSON)
    if (
        exported.tokenizer is not None
        and (directory / TOKENIZER_JSON).is_file()
        and not (directory / SETTINGS).is_file()
    ):
        settings = {
            "eos_token": exported.tokenizer.special_tokens["eos_token"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        write_synced(directory / SETTINGS, json.dumps(settings, indent=2) + "\n")


def _convert(directory: Path, exported: ExportedTokenizer) -> None:
    assert isinstance(exported.tokenizer, ByteTokenizer | SentencePieceTokenizer)
    try:
        files = converted(exported.tokenizer)
    except ConversionError as error:
        exported.notes.append(f"{exported.name} was copied unchanged: {error}")
        shutil.copyfile(exported.name or "", directory / "tokenizer.model")
        return
    if exported.template is not None:
        files[SETTINGS].pop("bos_token", None)  # conversations were rendered without one
    for name, content in files.items():
        write_synced(
            directory / name,
            json.dumps(content, indent=None if "model" in content else 2, ensure_ascii=False) + "\n",
        )


def _write_template(directory: Path, exported: ExportedTokenizer) -> None:
    """Write the chat template of the training data as the default. Templates with other names are kept.

    As transformers writes them, each template is a file, and tokenizer_config.json has none: beside a file it
    would not be read.
    """
    if exported.template is not None and (
        exported.tokenizer is None or exported.template != exported.tokenizer.chat_template
    ):
        write_synced(directory / TEMPLATE, exported.template)
    settings = directory / SETTINGS
    content = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    files = [path for path in (directory / TEMPLATE, directory / TEMPLATES) if path.exists()]
    if not files or "chat_template" not in content:
        return  # the tokenizer's own, where it was
    own = content.pop("chat_template")
    if exported.template is not None and isinstance(own, list) and not (directory / TEMPLATES).is_dir():
        _write_named(directory / TEMPLATES, own)
    write_synced(settings, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_named(folder: Path, templates: list[dict[str, str]]) -> None:
    """Write the non-default templates of tokenizer_config.json as files."""
    for each in templates:
        name, source = each["name"], each["template"]
        if name != "default" and Path(name).name == name:
            folder.mkdir(exist_ok=True)
            write_synced(folder / f"{name}.jinja", source)


def _checked(directory: Path, exported: ExportedTokenizer) -> TokenizerIdentity:
    """Read the written files as transformers does, and return their identity."""
    identity = replace(
        exported.identity, digest=digest_of(directory, tokenizer_files(directory)), readable=False
    )
    if exported.tokenizer is None or identity.digest == exported.identity.digest:
        return identity
    identity = replace(identity, fingerprint=identity.fingerprint or fingerprint(exported.tokenizer))
    try:
        if identity.fingerprint != fingerprint(HuggingFaceTokenizer(directory)):
            exported.reader = "PreTrainedTokenizerFast"
            why = "transformers uses different tokenization rules for this model type"
            exported.notes.append(
                f"AutoTokenizer encodes some texts differently from {exported.name} ({why}). Try "
                f"{exported.reader} or --family"
            )
    except ImportError:
        pass  # without transformers its reading cannot be checked
    except DataError as error:
        exported.notes.append(str(error))
    return identity
