"""Data with streams, or rewritten as streams, from its configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from megalite.config.samples import held_out_fraction, held_out_start
from megalite.config.sections.data import DataConfig
from megalite.config.streams import format_of, is_stream, names_in, streams_in
from megalite.config.token_files import named_sets, prefixes
from megalite.data.dataset import Dataset, TokenRange, build
from megalite.data.fill_in_the_middle import FillInTheMiddle
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.mixtures import NamedSets
from megalite.data.streams.blend import StreamBlend
from megalite.data.streams.jsonl import JsonLinesShard
from megalite.data.streams.mds import mds_shards
from megalite.data.streams.parquet import ParquetShard
from megalite.data.streams.shard import Shard, asked, filesystem_of
from megalite.data.streams.stream import Stream, lanes_for
from megalite.data.streams.token_documents import token_shards
from megalite.data.streams.webdataset import TarShard
from megalite.data.tokenizer.comparison import of_data
from megalite.data.tokenizer.tokenizers import Tokenizer, load, load_for

FILES: dict[str | None, type[JsonLinesShard | ParquetShard | TarShard]] = {
    "jsonl": JsonLinesShard,
    "parquet": ParquetShard,
    "webdataset": TarShard,
}
"""Formats whose shards are files, without an index."""
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def streamed(config: DataConfig, seed: int) -> tuple[Dataset, Dataset | None]:
    """Build the training dataset and the validation dataset, or None, of a configuration with streams.

    Raises DataError if a stream has no shards, or if one that is opened here cannot be read.
    """
    validation, plain = config.validation, replace(config, fim_rate=0.0)
    if config.fim_rate or streams_in(config.train):
        train = _dataset(config.train, config, seed, training=True)
        train.tokenizer = of_data(config)
    else:
        train, _ = build(replace(config, validation=None), seed)
    if validation is None:
        return train, None
    if held_out_fraction(config):
        return train, build(plain, seed)[1]
    if not streams_in(validation):
        as_train: Any = validation
        return train, build(replace(plain, train=as_train, validation=None, shuffle=False), seed)[0]
    if sets := named_sets(validation):
        return train, NamedSets({name: _dataset(each, plain, seed) for name, each in sets.items()})
    return train, _dataset(validation, plain, seed)


def _dataset(source: Any, config: DataConfig, seed: int, training: bool = False) -> Dataset:
    """Build a dataset with streams.

    Args:
        training: it is shuffled and rewritten as the configuration says, and its held-out part is left out.
    """
    weights = source if isinstance(source, dict) else {}
    groups = [[name] for name in weights] or [names_in(source)]
    shards = {", ".join(names): _shards_of(names, config, training) for names in groups}
    lanes = lanes_for(config, {name: len(of) for name, of in shards.items() if of})
    shuffle = training and config.shuffle

    def part(names: list[str]) -> Dataset:
        name = ", ".join(names)
        if not (of := shards[name]):  # token files as they are
            return build(replace(config, train=names, validation=None, shuffle=shuffle, fim_rate=0.0), seed)[
                0
            ]
        tokenizer = _tokenizer_of(names[0], config)
        fim = (
            FillInTheMiddle.of(tokenizer, config.fim_rate, config.fim_spm_rate, config.fim_tokens)
            if training and config.fim_rate
            else None
        )
        return Stream(name, of, tokenizer, config, lanes, seed=seed, shuffle=shuffle, fim=fim)

    parts = [part(names) for names in groups]
    return parts[0] if len(parts) == 1 else StreamBlend(parts, list(weights.values()), lanes)


def _shards_of(names: Sequence[str], config: DataConfig, training: bool) -> list[Any]:
    """Return the shards of streams, or of token files that are rewritten; none of other token files."""
    if streams := [name for name in names if is_stream(name)]:
        if len(streams) < len(names):
            raise DataError(
                f"{', '.join(names)} is a list of streams and token files, which cannot be joined end to "
                "end. Write {NAME: weight, …}, a blend of them."
            )
        return [shard for name in streams for shard in shards_of(name, config.text_key)]
    if not (training and config.fim_rate):
        return []
    held_out, shards = held_out_fraction(config), []
    for prefix in prefixes(list(names)):
        file = IndexedTokens(prefix)
        shards += token_shards(TokenRange(file, 0, held_out_start(file, held_out)))
    return shards


def _tokenizer_of(name: str, config: DataConfig) -> Tokenizer:
    try:
        return load(str(config.tokenizer)) if is_stream(name) else load_for(name)
    except DataError as error:
        raise DataError(str(error).replace("--tokenizer", "data.tokenizer")) from None


def shards_of(source: str, text_key: str) -> list[Shard]:
    """Return the shards of a stream FORMAT:PATH, in the order of their paths.

    Raises DataError if there are none.
    """
    form, path = format_of(source), source.partition(":")[2]
    if form == "mds":
        return list(mds_shards(path, text_key))
    sizes = _files(path, source)
    common = os.path.commonpath(sizes) if len(sizes) > 1 else os.path.dirname(next(iter(sizes)))
    make, scheme = FILES[form], "://" in path
    system = filesystem_of(path)[0]
    return [
        make(
            system.unstrip_protocol(file) if scheme else file, [os.path.relpath(file, common), size], text_key
        )
        for file, size in sizes.items()
    ]


def _files(path: str, source: str) -> dict[str, int | None]:
    """Return the files of a path, a glob or ranges in braces, and their sizes in bytes as far as known."""
    system, _ = filesystem_of(path)
    files: dict[str, int | None] = {}
    for one in expanded(path):
        try:
            matches = asked(system, one, partial(_matches, system, system._strip_protocol(one)))
        except (OSError, ValueError) as error:
            raise DataError(f"{source}: {one} could not be opened ({error}). Correct the path.") from None
        files |= {name: info.get("size") for name, info in sorted(matches.items()) if info["type"] == "file"}
    if not files:
        raise DataError(f"{source} matches no file. Name a file, a glob, or a range such as {{000..127}}.")
    return files


def _matches(system: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return the files of a path or a glob in a file system, with what it says of them."""
    if not any(letter in path for letter in "*?["):
        return {path: system.info(path)}
    matches: dict[str, dict[str, Any]] = system.glob(path, detail=True)
    for name, info in matches.items():
        if info["type"] not in ("file", "directory"):  # a symbolic link, which a glob does not follow
            matches[name] = system.info(name)
    return matches


def expanded(path: str) -> list[str]:
    """Return the paths that a path with braces stands for: {000..127}, {a,b}."""
    pieces = re.split(r"\{([^{}]*)\}", path)
    choices = [[piece] if number % 2 == 0 else _choices(piece) for number, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    if (limits := RANGE.fullmatch(inside)) is None:
        return inside.split(",")
    first, last = limits.groups()
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
