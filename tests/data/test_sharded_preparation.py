"""A preparation in shards is the preparation of one process, byte for byte."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megalite.data.indexed import DataError
from megalite.data.preparation import sources as sourcing
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.prepare import Encoder, PreparationSummary, prepare
from megalite.data.preparation.shards import Merge, PreparationShard
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.texts import Texts
from tests.data.chats import CHATML, write_tokenizer

TEXTS = [f"{i} " + "def f(x):\n    return grüße\n" * (i % 13) for i in range(200)]


def write_corpus(directory: Path) -> list[str]:
    """Text files, one of them so long that it is read in pieces, and records, some of them bad, of which some are read
    by one process."""
    import pyarrow
    from pyarrow import parquet

    directory.mkdir()
    for i in range(12):
        (directory / f"a{i:02}.txt").write_text(TEXTS[i] * (300 if i == 7 else 1))
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[17], lines[150] = '{"text": 1}', '{"text": ""}'
    (directory / "b.jsonl").write_text("\n".join(lines))
    (directory / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:50]).encode()))
    parquet.write_table(pyarrow.table({"text": TEXTS[:40]}), directory / "d.parquet")
    (directory / "e.jsonl").write_bytes(b'{"text": "\xff"}\n' * 3)
    (directory / "empty.txt").write_text("")
    return [str(directory / "*")]


def write_chats(directory: Path) -> list[str]:
    directory.mkdir()
    pairs = [({"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}) for text in TEXTS]
    turns: list[Any] = [{"messages": list(pair)} for pair in pairs]
    turns[150]["messages"][1]["weight"] = 0.5  # the mask before it has no weights
    (directory / "chats.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return [str(directory / "chats.jsonl")]


@pytest.fixture
def small_tasks(monkeypatch):
    for name, size in (("TASK_BYTES", 512), ("PIECE_BYTES", 2048), ("LONG_TEXT", 8192)):
        monkeypatch.setattr(sourcing, name, size)


def make(inputs: list[str], prefix: Any, tokenizer: str, encoder: Encoder, **options: Any) -> PreparationSummary:
    key = encoder.text_key if isinstance(encoder, Texts) else None
    sources = open_inputs(inputs, exclude=[], file_format="auto", text_key=key, split="train", skip_bad=True)
    return prepare(sources, prefix, tokenizer, encoder, **options)


def files(prefix: Path) -> dict[str, bytes]:
    name = prefix.name
    paths = [path for path in prefix.parent.iterdir() if path.name.startswith(name)]
    return {path.name.removeprefix(name): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", ["texts", "chats"])
@pytest.mark.parametrize("count", [3, 40])
def test_shards_make_the_same_files(kind, count, small_tasks, tmp_path):
    if kind == "texts":
        inputs, tokenizer, encoder = write_corpus(tmp_path / "corpus"), "byte", Texts(skip_bad=2)
    else:
        tokenizer = str(write_tokenizer(tmp_path / "tokenizer", CHATML))
        inputs, encoder = write_chats(tmp_path / "corpus"), Chats(max_length=300)
    expected = make(inputs, tmp_path / "one" / "x", tokenizer, encoder)
    whole = tmp_path / "many" / "x"
    shards = [PreparationShard(whole, number, count) for number in range(1, count + 1)]
    random.Random(0).shuffle(shards)
    summaries = [
        make(inputs, shard, tokenizer, encoder, workers=1 + (count == 3 and kind == "texts")) for shard in shards
    ]
    assert sum(each.documents for each in summaries) == expected.documents
    assert len([each for each in summaries if each.documents]) > (1 if count == 3 else count // 4)
    before = files(whole)
    assert all(make(inputs, shard, tokenizer, encoder).existing for shard in shards) and files(whole) == before
    merged = make(inputs, Merge(whole), tokenizer, encoder)
    assert files(whole) == files(tmp_path / "one" / "x"), "and no shard is left"
    assert vars(merged) == vars(expected) | {"prefix": str(whole)}
    assert make(inputs, shards[0], tokenizer, encoder).existing, "merged already"
    for ending, content in before.items():
        whole.with_name(whole.name + ending).write_bytes(content)
    assert make(inputs, Merge(whole), tokenizer, encoder).existing
    assert files(whole) == files(tmp_path / "one" / "x"), "nor after a merge that was killed before it removed them"


def test_what_cannot_be_merged(tmp_path):
    inputs, whole = write_corpus(tmp_path / "corpus"), tmp_path / "x"

    def message(part: Any, skip_bad: int = 2) -> str:
        with pytest.raises(DataError) as caught:
            make(inputs, part, "byte", Texts(skip_bad=skip_bad))
        return str(caught.value)

    assert "there are no shards" in message(Merge(whole))
    for number in (1, 3):
        make(inputs, PreparationShard(whole, number, 3), "byte", Texts(skip_bad=2))
    assert "missing: 2). Run them again with --shard 2/3" in message(Merge(whole))
    make(inputs, PreparationShard(whole, 2, 3), "byte", Texts(skip_bad=2))
    assert "other inputs or with other options" in message(Merge(whole), skip_bad=3)
    make(inputs, PreparationShard(whole, 1, 2), "byte", Texts(skip_bad=2))
    assert "shards of 2 and 3" in message(Merge(whole))
    make(inputs, whole, "byte", Texts(skip_bad=2))
    assert "already contains data" in message(PreparationShard(whole, 1, 3), skip_bad=4)
    for text in ("3", "0/2", "3/2", "a/b"):
        with pytest.raises(DataError, match=f"--shard {text} is not I/N"):
            PreparationShard.parsed(whole, text)


def test_bad_records_are_counted_over_all_shards(small_tasks, tmp_path):
    (tmp_path / "x.jsonl").write_text(('{"text": 1}\n' + json.dumps({"text": "a" * 600}) + "\n") * 4)
    inputs, whole = [str(tmp_path / "x.jsonl")], tmp_path / "x"
    for number in (1, 2):
        make(inputs, PreparationShard(whole, number, 2), "byte", Texts(skip_bad=3))
    with pytest.raises(DataError, match="more bad records than --skip_bad 3"):
        make(inputs, Merge(whole), "byte", Texts(skip_bad=3))
