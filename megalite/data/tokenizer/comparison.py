"""Refuses to bring together what different tokenizers made: the same id would mean one piece there and
another here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.sections.data import DataConfig
from megalite.config.token_files import prefixes
from megalite.data.tokenizer.identity import TokenizerIdentity, fingerprint, of_token_file, probes

if TYPE_CHECKING:
    from megalite.data.tokenizer.tokenizers import Tokenizer

SHOWN = 5
"""Differing ids in a message."""
OPTION = "data.allow_tokenizer_change = true"


@dataclass(frozen=True)
class Tokenized:
    """Something made with a tokenizer, or the tokenizer itself. what: its option and value, as messages name
    it."""

    what: str
    tokenizer: TokenizerIdentity
    itself: bool = False


def compare(
    here: Tokenized,
    there: Tokenized,
    *,
    allow: bool,
    way_out: str,
    option: str = OPTION,
    may_add: bool = False,
) -> list[str]:
    """Raise ConfigError if two things were made with different tokenizers, unless that is allowed.

    Args:
        way_out: how to avoid the change, as the beginning of a sentence that goes on with the option that
        accepts it. option: the option that accepts it.
        may_add: the tokenizer here may have tokens after those of the other one.

    Returns:
        a line for the user if a change is accepted, or if only one of the tokenizers is known; else none.
    """
    try:
        same = here.tokenizer.is_same(there.tokenizer)
    except (ConfigError, ImportError) as error:
        return [f"the tokenizers of {here.what} and {there.what} cannot be compared: {_reason(error)}"]
    if same:
        return []
    if same is None:
        if not (here.tokenizer.can_be_known or there.tokenizer.can_be_known):
            return []
        unknown = there if here.tokenizer.can_be_known else here
        other = here if unknown is there else there
        return [
            f"the tokenizer of {unknown.what} is not known, so whether it is that of {other.what} is not "
            "checked"
        ]
    loaded = _loaded(there.tokenizer, here.tokenizer) if may_add or not allow else ""
    if may_add and not isinstance(loaded, str) and (added := added_pieces(*loaded)) is not None:
        pieces = ", ".join(map(_piece, islice(added, SHOWN))) + (", …" if len(added) > SHOWN else "")
        return [f"the tokenizer of {here.what} adds {len(added)} tokens to that of {there.what}: {pieces}"]
    names = " and ".join(dict.fromkeys(f"{each.tokenizer.name}" for each in (there, here)))
    verb, whose = ("is", "that of ") if here.itself else ("was made with", "")
    changed = f"{here.what} {verb} another tokenizer than {whose}{there.what} ({names})"
    if allow:
        return [f"{changed}, which {option} accepts"]
    shown = loaded if isinstance(loaded, str) else "; ".join(islice(differences(*loaded), SHOWN))
    raise ConfigError(f"{changed}. {shown}. {way_out}, or accept the change with {option}.")


def _reason(error: Exception) -> str:
    return f"the package {error.name} is not installed" if isinstance(error, ImportError) else str(error)


def _loaded(*identities: TokenizerIdentity) -> list[Tokenizer] | str:
    """The tokenizers, or why they cannot be read as they were any more."""
    from megalite.data.tokenizer.tokenizers import load

    loaded = []
    for identity in identities:
        try:
            tokenizer = load(identity.name or "")
            if fingerprint(tokenizer) != identity.known():
                return f"Which ids differ cannot be shown: {identity.name} has changed since"
        except (ConfigError, ImportError, OSError) as error:
            return f"Which ids differ cannot be shown: {_reason(error).removesuffix('.')}"
        loaded.append(tokenizer)
    return loaded


def added_pieces(there: Tokenizer, here: Tokenizer) -> list[str] | None:
    """What the second tokenizer adds to the first one; None if any id of the first means something else in
    it."""
    old, new = there.structure(), here.structure()
    changed = any(
        before not in ("", now)
        for before, now in zip_longest(old.pieces, new.pieces[: len(old.pieces)], fillvalue="")
    )
    if changed or old.rules != new.rules or not old.special.items() <= new.special.items():
        return None
    before = old.pieces + [""] * (len(new.pieces) - len(old.pieces))
    return [now for was, now in zip(before, new.pieces, strict=True) if was != now]


def differences(there: Tokenizer, here: Tokenizer) -> Iterator[str]:
    """The ids with different pieces; if there are none, a text with different ids."""
    structure = there.structure()
    pieces = (structure.pieces, here.structure().pieces)
    differs = False
    for i, (before, now) in enumerate(zip_longest(*pieces, fillvalue="")):
        if before != now:
            differs = True
            yield f"id {i} is {_piece(before)} there and {_piece(now)} here"
    if differs:
        return
    for text in probes(structure):
        before_ids, now_ids = there.encode(text), here.encode(text)
        if before_ids != now_ids:
            yield f"all pieces are the same, and {_difference(before_ids, now_ids, pieces[0])}"
            return
    yield (
        "all pieces and the ids of the probe texts are the same, but not the merges, scores or control tokens"
    )


def _piece(piece: str) -> str:
    return show([piece])[1:-1] if piece else "nothing"


def _difference(before: Sequence[int], now: Sequence[int], pieces: Sequence[str]) -> str:
    """Where two encodings of a text first differ."""
    same = next(
        (i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other),
        min(len(before), len(now)),
    )
    one, other = (_ids(ids[same : same + SHOWN], pieces) for ids in (before, now))
    return f"a text becomes {one} there and {other} here"


def _ids(ids: Sequence[int], pieces: Sequence[str]) -> str:
    return f"{list(ids)} ({' '.join(_piece(pieces[i]) for i in ids)})"


# ---- data


def of_data(data: DataConfig) -> TokenizerIdentity:
    """The tokenizer of the training data: that of its first token file of which it is known."""
    identities = [of_token_file(prefix) for prefix in prefixes(data.train)]
    first = identities[0] if identities else TokenizerIdentity()
    return next((identity for identity in identities if identity.can_be_known), first)


def one_tokenizer(data: DataConfig) -> list[str]:
    """Check that all token files of training and validation data were made with one tokenizer. Raises
    ConfigError; returns lines for the user."""
    files = [
        (option, prefix) for option in ("train", "validation") for prefix in prefixes(getattr(data, option))
    ]
    tokenized = [Tokenized(f"data.{option} = {prefix}", of_token_file(prefix)) for option, prefix in files]
    known = [each for each in tokenized if each.tokenizer.can_be_known]
    notes = _templates(tokenized)
    for each in tokenized if known else ():
        if each is not known[0]:
            way_out = f"Prepare both with one tokenizer, {known[0].tokenizer.name}"
            notes += compare(each, known[0], allow=data.allow_tokenizer_change, way_out=way_out)
    return notes


def _templates(tokenized: Sequence[Tokenized]) -> list[str]:
    """A line for the user if conversations were rendered with several chat templates, which may be meant."""
    first = {
        each.tokenizer.template_hash: each.what
        for each in reversed(tokenized)
        if each.tokenizer.template_hash is not None
    }
    listed = ", ".join(f"{what} (hash {template})" for template, what in first.items())
    return (
        [f"the conversations were rendered with several chat templates: {listed}"] if len(first) > 1 else []
    )
