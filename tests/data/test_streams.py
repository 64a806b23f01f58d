"""Streams: documents, order, resuming and ranks, against what their definitions say."""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset, Sample, build
from megalite.data.indexed import DataError
from megalite.data.loader import Loader
from megalite.data.mixtures import Blend
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.streams.build import expanded
from megalite.data.streams.stream import Streamed
from megalite.data.tokenizer.tokenizers import ByteTokenizer
from megalite.mesh.layout import AxisPlace
from megalite.stores import object_store, retried_file
from megalite.stores.errors import ConflictError, StoreError
from megalite.stores.retried_file import open_file
from tests.data.streams import SHARDS, TEXTS, WRITERS, shares, write_jsonl
from tests.data.unsteady import ConnectionLost, UnsteadyFileSystem

S, EOS = 32, 256


def config(train: Any, **options: Any) -> DataConfig:
    return DataConfig(**{"train": train, "sequence_length": S, "tokenizer": "byte", "lanes": 2} | options)


def stream(train: Any, seed: int = 1, **options: Any) -> Streamed:
    data, _ = build(config(train, **options), seed)
    assert isinstance(data, Streamed)
    return data


def whole(sample: Sample) -> list[int]:
    assert sample.tokens[1:].tolist() == sample.targets[:-1].tolist() and len(sample.tokens) == S
    return [*sample.tokens.tolist(), int(sample.targets[-1])]


def lane(data: Dataset, number: int, lanes: int, rows: int) -> list[int]:
    """The tokens of the first rows of a lane."""
    samples = [whole(data[row * lanes + number]) for row in range(rows)]
    assert all(one[-1] == other[0] for one, other in pairwise(samples))
    return [samples[0][0], *(token for row in samples for token in row[1:])]


def documents(tokens: list[int]) -> list[str]:
    """The whole documents of text, which is in bytes with an EOS after each."""
    ends = [i for i, token in enumerate(tokens) if token == EOS]
    return [bytes(tokens[start + 1 : end]).decode() for start, end in pairwise([-1, *ends])]


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_are_the_documents_of_their_shards(form, lanes, tmp_path):
    """Joined end to end, through more than one epoch."""
    data = stream(WRITERS[form](tmp_path, shares()), lanes=lanes, shuffle=False)
    for number in range(lanes):
        once = [text for part in shares()[number::lanes] for text in part if text]
        expected = [token for text in once * 3 for token in [*text.encode(), EOS]]
        rows = 2 * len(expected) // (3 * S)
        assert lane(data, number, lanes, rows) == expected[: rows * S + 1]
    assert (data.vocab_size, data.eos) == (257, EOS)


def test_one_lane_is_the_token_file(tmp_path):
    """`megalite prepare` reads the same files to the same rows."""
    name = write_jsonl(tmp_path, shares())
    sources = open_inputs([name.removeprefix("jsonl:")], exclude=[], file_format="auto", text_key="text", split="train")
    prepare(sources, tmp_path / "tokens", "byte")
    data, (tokens, _) = (
        stream(name, lanes=1, shuffle=False),
        build(DataConfig(str(tmp_path / "tokens"), None, False, S), 1),
    )
    for i in range(tokens.samples_per_epoch):
        assert whole(data[i]) == whole(tokens[i])


def test_any_file_system(tmp_path):
    """Files in memory, one of them through a list of streams, and symbolic links."""
    memory = fsspec.filesystem("memory")
    for number, part in enumerate(shares()):
        with memory.open(f"/corpus/{number}.jsonl", "wb") as file:
            file.write("".join(json.dumps({"body": text}) + "\n" for text in part).encode())
    options = {"lanes": 1, "shuffle": False, "text_key": "body"}
    data = stream(["jsonl:memory://corpus/{0,1}.jsonl", "jsonl:memory://corpus/[2-9].jsonl"], **options)
    assert documents(lane(data, 0, 1, 400))[: len(TEXTS) - 1] == [text for text in TEXTS if text]
    for number, text in enumerate("ab"):  # as in the cache of huggingface_hub
        (tmp_path / f"blob{number}").write_text(json.dumps({"body": text}) + "\n")
        (tmp_path / f"{number}.jsonl").symlink_to(f"blob{number}")
    assert documents(lane(stream(f"jsonl:{tmp_path}/*.jsonl", **options), 0, 1, 4))[:3] == ["a", "b", "a"]
    assert expanded("s3://b/{00..02}-{a,b}.tar")[1:3] == ["s3://b/00-b.tar", "s3://b/01-a.tar"]


@pytest.mark.parametrize("form", WRITERS)
def test_a_remote_file_system_that_fails_at_times_changes_nothing(form, tmp_path, monkeypatch):
    """Each fourth access fails with an error of its library: at the start, and in the middle of a file."""
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(retried_file, "BUFFER", 64)
    name = WRITERS[form](tmp_path, shares())
    memory, place = fsspec.filesystem("memory"), f"/unsteady/{form}"
    for path in tmp_path.iterdir():
        memory.pipe(f"{place}/{path.name}", path.read_bytes())
    accesses, failed = Counter[str](), Counter[str]()

    def before(access: str) -> None:
        accesses[access] += 1
        if accesses[access] % 4 == 1:
            failed[access] += 1
            raise ConnectionLost(f"{access} number {accesses[access]}")

    monkeypatch.setattr(UnsteadyFileSystem, "before", staticmethod(before))
    options = {"lanes": 2, "shuffle": form == "jsonl", "shuffle_buffer": 4}
    data = stream(name.replace(str(tmp_path), f"unsteady:/{place}"), **options)
    local = stream(name, **options)
    assert [whole(data[i]) for i in range(200)] == [whole(local[i]) for i in range(200)]
    assert (
        failed["read"] > 3
        and failed["info"]
        and (failed["list"] or "*" not in name)
        and (failed["cat"] or form != "mds")
    )


def test_a_remote_file_system_that_does_not_answer_or_has_another_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(retried_file, "DATA_PATIENCE_S", 0.2)
    monkeypatch.setattr(retried_file, "BUFFER", 64)
    url, down = "unsteady://unsteady/one.jsonl", False
    memory = fsspec.filesystem("memory")
    memory.pipe("/unsteady/one.jsonl", json.dumps({"text": "a" * 500}).encode() * 9)

    def before(access: str) -> None:
        if access == "read" and down:
            raise ConnectionLost("reset by peer")

    monkeypatch.setattr(UnsteadyFileSystem, "before", staticmethod(before))
    system = fsspec.filesystem("unsteady")
    with open_file(system, "/unsteady/one.jsonl", url) as file:
        first = file.read(10)
        down = True
        with pytest.raises(StoreError, match=rf"{url} could not be reached .*ConnectionLost: reset by peer"):
            file.read(1 << 17)
        down = False
        assert first + file.read(90) == memory.cat_file("/unsteady/one.jsonl")[:100]
        down = True
        memory.pipe("/unsteady/one.jsonl", b"another one")
        with pytest.raises(ConflictError, match=f"{url} has been replaced"):
            file.read(1 << 17)
    with pytest.raises(DataError, match=r"unsteady/missing.jsonl could not be opened"):
        stream("jsonl:unsteady://unsteady/missing.jsonl")


@pytest.mark.parametrize("form", WRITERS)
def test_shuffling(form, tmp_path):
    """Each epoch of a lane has the documents of its shards once, in another order, whatever is read first."""
    name = WRITERS[form](tmp_path, shares())
    data, again = stream(name, shuffle_buffer=7, lanes=1), stream(name, shuffle_buffer=7, lanes=1)
    read = documents(lane(data, 0, 1, 500))
    count = len(TEXTS) - 1
    one, two = read[:count], read[count : 2 * count]
    assert sorted(one) == sorted(two) == sorted(text for text in TEXTS if text)
    assert one != two and one != [text for text in TEXTS if text]
    order = np.random.default_rng(0).permutation(40)
    assert all(whole(again[int(i)]) == whole(data[int(i)]) for i in order)
    first = [TEXTS.index(text) // 10 for text in one]
    assert len([1 for a, b in pairwise(first) if a != b]) > SHARDS, "the buffer joins shards"
    assert data.fingerprint == again.fingerprint
    others = [stream(name, 2), stream(name, shuffle_buffer=8), stream(name, shuffle=False), stream(name, lanes=4)]
    assert len({each.fingerprint for each in (data, *others)}) == 5


def restored(data: Streamed, saved: np.ndarray) -> Streamed:
    for number, position in enumerate(saved.tolist()):
        data.restore(number, position)
    return data


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_positions_continue_where_they_were(form, shuffle, tmp_path, monkeypatch):
    """From the position of every sample on, the same samples, and few documents read again."""
    name = WRITERS[form](tmp_path, shares())
    make = lambda: stream(name, shuffle=shuffle, shuffle_buffer=6)  # noqa: E731
    data = make()
    expected = [whole(data[i]) for i in range(200)]
    encoded = Counter[str]()
    encode = ByteTokenizer.encode_batch
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: encoded.update(texts) or encode(self, texts))
    for samples in (0, 1, 37, 90, 137, 180):
        saved = data.positions(range(2), samples)
        assert saved.shape == (2, data.width) and (saved[:, 0] <= -(-samples // 2)).all()
        assert (saved[:, 0] > samples // 2 - 10).all(), "near the sample"
        encoded.clear()
        other = restored(make(), saved)
        assert [whole(other[i]) for i in range(samples, samples + 8)] == expected[samples : samples + 8]
        assert encoded.total() <= 2 * 32
    half = stream(name, shuffle=shuffle, shuffle_buffer=6)
    assert [whole(half[i]) for i in (150, 3, 150)] == [expected[i] for i in (150, 3, 150)], "without a position, too"


def loaded(name: Any, dp: int, steps: int, batch: int = 8, **options: Any) -> tuple[list[list[list[int]]], int]:
    """The global batches that `dp` ranks read, and the number of documents that they tokenize."""
    batches: list[dict[int, list[int]]] = [{} for _ in range(steps)]
    encoded = Counter[str]()
    encode = ByteTokenizer.encode_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: encoded.update(texts) or encode(self, texts))
        for rank in range(dp):
            data = stream(name, **options)
            loader = Loader(data, global_batch_size=batch, micro_batch_size=2, dp=AxisPlace(rank, dp))
            for step in range(steps):
                for microbatch in loader.step(step * batch):
                    for at, sample in enumerate(microbatch.samples.tolist()):
                        assert sample not in batches[step]
                        batches[step][sample] = microbatch.tokens[:, at].tolist()
            loader.close()
    return [[rows[i] for i in sorted(rows)] for rows in batches], encoded.total()


def test_ranks_read_disjoint_parts_of_one_sequence(tmp_path):
    long = [text * 9 for text in TEXTS[:56]]
    name = write_jsonl(tmp_path, shares(long, 8))
    expected, once = loaded(name, 1, 6, lanes=8, shuffle_buffer=2)
    for dp in (2, 4):
        batches, encoded = loaded(name, dp, 6, lanes=8, shuffle_buffer=2)
        assert batches == expected
        assert encoded == once, "no document is tokenized on two ranks"
    assert loaded(name, 4, 6, lanes=3)[0] == loaded(name, 1, 6, lanes=3)[0], "lanes that ranks share"


def test_blend(tmp_path, write):
    """Of streams and a token file: each lane has the proportions of the weights, and no sample comes twice."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    names = [write_jsonl(a, shares()), WRITERS["parquet"](b, shares([f"<{text}>" for text in TEXTS if text]))]
    numbers = write("numbers", [[*range(100), EOS]] * 40, metadata={"vocab_size": 257, "eos": EOS}, code=4)
    data = stream({names[0]: 0.5, names[1]: 0.3, numbers: 0.2}, lanes=4)
    assert isinstance(data, Blend)
    located = [data.locate(i) for i in range(400)]
    assert len({*located}) == 400 and Counter(source for source, _ in located) == {0: 200, 1: 120, 2: 80}
    for number in range(4):
        assert Counter(source for source, _ in located[number::4][:50]) == {0: 25, 1: 15, 2: 10}
    assert [int(data.period[i % len(data.period)]) for i in range(400)] == [source for source, _ in located]
    assert all({source for source, _ in located[i : i + 8]} == {0, 1, 2} for i in range(0, 400, 8)), "mixed batches"
    expected = [whole(data[i]) for i in range(120)]
    other = restored(stream({names[0]: 0.5, names[1]: 0.3, numbers: 0.2}, lanes=4), data.positions(range(4), 81))
    assert [whole(other[i]) for i in range(81, 120)] == expected[81:]
    tokens = [data.parts[source][sample].tokens.tolist() for source, sample in located[:120]]
    assert [row[:-1] for row in expected] == tokens


def test_validation(tmp_path, counting):
    """A stream in order, sets of streams, token files beside a stream, and a held-out part."""
    name, numbers = write_jsonl(tmp_path, shares()), counting("numbers", 300).prefix
    _, ordered = build(config(name, validation=name), 1)
    _, sets = build(config(numbers, validation={"a": name, "b": numbers}), 1)
    _, tokens = build(config(name, validation=numbers), 1)
    assert ordered is not None and sets is not None and tokens is not None
    assert documents(lane(ordered, 0, 2, 50))[:9] == [text for text in TEXTS[:10] if text]
    assert [*sets.sets] == ["a", "b"] and whole(sets.sets["a"][3]) == whole(ordered[3])
    assert whole(tokens[0]) == whole(sets.sets["b"][0]) == list(range(S + 1))


BAD = {
    "jsonl": (b'{"text": "a"}\n{"text": 1}\n', "line 2: the value of data.text_key text must be a string"),
    "jsonl json": (b'\n{"text": "a"}\n{"te', "line 3 is not valid JSON"),
    "jsonl key": (b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no key text .data.text_key"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named(case, tmp_path, capsys):
    content, reason = BAD[case]
    (tmp_path / "x.jsonl").write_bytes(content)
    name = f"jsonl:{tmp_path / 'x.jsonl'}"
    with pytest.raises(DataError, match=rf"{tmp_path}/x.jsonl {reason}.*data.bad_records to skip"):
        stream(name, lanes=1)[0]
    assert documents(lane(stream(name, lanes=1, bad_records="skip"), 0, 1, 4))[:3] == ["a"] * 3
    assert capsys.readouterr().err.count(f"skipped: {tmp_path}/x.jsonl line ") == 1


def test_damaged_shards_and_wrong_names(tmp_path):
    def message(name: str, **options: Any) -> str:
        with pytest.raises(DataError) as caught:
            stream(name, **{"lanes": 1, "shuffle": False} | options)[0]
        return str(caught.value)

    names = {}
    for form, write in WRITERS.items():
        (tmp_path / form).mkdir()
        names[form] = write(tmp_path / form, shares())
    assert "part-0.parquet has no column body. Set data.text_key to one of its columns: id, text" in message(
        names["parquet"], text_key="body"
    )
    assert "the column id is int64, not text" in message(names["parquet"], text_key="id")
    assert "has the encoding int, not text" in message(names["mds"], text_key="b")
    assert "more than the shards" in message(names["jsonl"], lanes=7)
    assert "matches no file" in message(f"jsonl:{tmp_path}/*.txt")
    assert "there is no" in message(f"mds:{tmp_path}")
    assert "Install the fsspec package of its scheme" in message("jsonl:nothere://a/b.jsonl")
    for form, file in (("parquet", "part-0.parquet"), ("webdataset", "part-000000.tar"), ("mds", "shard.00000.mds")):
        path = tmp_path / form / file
        size = path.stat().st_size // 2
        if form == "webdataset":  # between two members, where tarfile sees the end of the archive
            with tarfile.open(path) as archive:
                size = archive.getmembers()[5].offset
        os.truncate(path, size)
        said = message(names[form])
        assert f"{path} " in said and "could not be read" in said
    index = Path(tmp_path / "mds" / "index.json")
    index.write_text(index.read_text().replace('"mds"', '"json"'))
    assert f"{index} lists a shard of format json" in message(names["mds"])
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert "no text in" in message(f"jsonl:{tmp_path}/empty.jsonl")
