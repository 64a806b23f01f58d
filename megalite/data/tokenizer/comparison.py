"""Comparison of tokenizers, which rejects combining data and weights of different ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.sections.data import DataConfig
from megalite.config.streams import streams_in
from megalite.config.token_files import prefixes
from megalite.data.tokenizer.identity import (
    TokenizerIdentity,
    fingerprint,
    of_token_file,
    of_tokenizer,
    probes,
)

if TYPE_CHECKING:
    from megalite.data.tokenizer.tokenizers import Tokenizer

SHOWN = 5
"""Maximum number of differing ids in a message."""
OPTION = "data.allow_tokenizer_change=true"


@dataclass(frozen=True)
class Tokenized:
    """A tokenizer, or an object that was made with one.

    Attributes:
        what: option and value of the object, for messages.
    """

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
        way_out: how to avoid the difference, as the start of a sentence that ends with `option`.
        option: the option that accepts the difference.
        may_add: the tokenizer of `here` may have additional tokens at the end.

    Returns:
        A note if a difference is accepted, or if only one of the tokenizers is known; otherwise none.
    """
    try:
        same = here.tokenizer.is_same(there.tokenizer)
    except (ConfigError, ImportError) as error:
        return [f"could not compare the tokenizers of {here.what} and {there.what}: {_reason(error)}"]
    if same:
        return []
    if same is None:
        if not (here.tokenizer.can_be_known or there.tokenizer.can_be_known):
            return []
        unknown = there if here.tokenizer.can_be_known else here
        other = here if unknown is there else there
        return [
            f"the tokenizer of {unknown.what} is unknown, so it was not compared with the tokenizer of "
            f"{other.what}"
        ]
    loaded = _loaded(there.tokenizer, here.tokenizer) if may_add or not allow else ""
    if may_add and not isinstance(loaded, str) and (added := added_pieces(*loaded)) is not None:
        pieces = ", ".join(map(_piece, islice(added, SHOWN))) + (", …" if len(added) > SHOWN else "")
        return [
            f"the tokenizer of {here.what} adds {len(added)} tokens to the tokenizer of {there.what}: "
            f"{pieces}"
        ]
    names = " and ".join(dict.fromkeys(f"{each.tokenizer.name}" for each in (there, here)))
    differs = "is not the tokenizer of" if here.itself else "uses a different tokenizer than"
    changed = f"{here.what} {differs} {there.what} ({names})"
    if allow:
        return [f"{changed}; continuing because of {option}"]
    shown = loaded if isinstance(loaded, str) else "; ".join(islice(differences(*loaded), SHOWN))
    raise ConfigError(f"{changed}. {shown}. {way_out}, or use {option} to continue anyway.")


def _reason(error: Exception) -> str:
    return f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)


def _loaded(*identities: TokenizerIdentity) -> list[Tokenizer] | str:
    """Load the tokenizers, or return the reason why they cannot be loaded unchanged."""
    from megalite.data.tokenizer.tokenizers import load

    loaded = []
    for identity in identities:
        try:
            tokenizer = load(identity.name or "")
            if fingerprint(tokenizer) != identity.known():
                return f"Could not determine which ids differ: {identity.name} has changed"
        except (ConfigError, ImportError, OSError) as error:
            return f"Could not determine which ids differ: {_reason(error).removesuffix('.')}"
        loaded.append(tokenizer)
    return loaded


def added_pieces(there: Tokenizer, here: Tokenizer) -> list[str] | None:
    """Return the pieces that the second tokenizer adds to the first, or None if existing ids differ."""
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
    """Yield the ids with different pieces or, if there are none, a text with different ids."""
    structure = there.structure()
    pieces = (structure.pieces, here.structure().pieces)
    differs = False
    for i, (before, now) in enumerate(zip_longest(*pieces, fillvalue="")):
        if before != now:
            differs = True
            yield f"id {i} was {_piece(before)} and is now {_piece(now)}"
    if differs:
        return
    for text in probes(structure):
        before_ids, now_ids = there.encode(text), here.encode(text)
        if before_ids != now_ids:
            yield f"all pieces are the same, but {_difference(before_ids, now_ids, pieces[0])}"
            return
    yield (
        "the merges, scores or control tokens differ, although all pieces and the ids of the probe texts "
        "are equal"
    )


def _piece(piece: str) -> str:
    return show([piece])[1:-1] if piece else "nothing"


def _difference(before: Sequence[int], now: Sequence[int], pieces: Sequence[str]) -> str:
    """Describe where two encodings of a text first differ."""
    same = next(
        (i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other),
        min(len(before), len(now)),
    )
    one, other = (_ids(ids[same : same + SHOWN], pieces) for ids in (before, now))
    return f"a text was encoded as {one} and is now encoded as {other}"


def _ids(ids: Sequence[int], pieces: Sequence[str]) -> str:
    return f"{list(ids)} ({' '.join(_piece(pieces[i]) for i in ids)})"


# ---- data


def of_data(data: DataConfig) -> TokenizerIdentity:
    """Return the tokenizer of the training data, from the first token file that records one."""
    identities = [of_token_file(prefix) for prefix in prefixes(data.train)]
    if data.tokenizer is not None and streams_in(data.train):
        identities.append(of_tokenizer(data.tokenizer))
    first = identities[0] if identities else TokenizerIdentity()
    return next((identity for identity in identities if identity.can_be_known), first)


def one_tokenizer(data: DataConfig) -> list[str]:
    """Check that all token files of training and validation data were made with the same tokenizer.

    Returns lines for the user. Raises ConfigError.
    """
    files = [
        (option, prefix) for option in ("train", "validation") for prefix in prefixes(getattr(data, option))
    ]
    tokenized = [Tokenized(f"data.{option} = {prefix}", of_token_file(prefix)) for option, prefix in files]
    if data.tokenizer is not None:
        tokenized.append(Tokenized(f"data.tokenizer = {data.tokenizer}", of_tokenizer(data.tokenizer)))
    known = [each for each in tokenized if each.tokenizer.can_be_known]
    notes = _templates(tokenized)
    for each in tokenized if known else ():
        if each is not known[0]:
            way_out = f"Prepare both with the same tokenizer ({known[0].tokenizer.name})"
            notes += compare(each, known[0], allow=data.allow_tokenizer_change, way_out=way_out)
    return notes


def _templates(tokenized: Sequence[Tokenized]) -> list[str]:
    """Return a note if conversations were rendered with different chat templates, which may be intended."""
    first = {
        each.tokenizer.template_hash: each.what
        for each in reversed(tokenized)
        if each.tokenizer.template_hash is not None
    }
    listed = ", ".join(f"{what} (hash {template})" for template, what in first.items())
    return (
        [f"the conversations were rendered with different chat templates: {listed}"] if len(first) > 1 else []
    )
