"""The token file: equal to the format's description byte for byte, and refused where it is damaged."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.preparation.writer import IndexedWriter, token_dtype

DOCUMENTS = [[5, 6, 7, 99], [99], [1, 2, 99]]


def save(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> None:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, np.int32), [len(document)])
        writer.finish({"vocab_size": vocab_size, "eos": 99})


@pytest.mark.parametrize(("vocab_size", "code"), [(100, 8), (65499, 8), (65500, 4), (200_000, 4)])
def test_writer_is_bit_compatible(tmp_path, write, vocab_size, code):
    largest = [[vocab_size - 1, 0, 99], *DOCUMENTS]
    save(tmp_path / "ours", largest, vocab_size)
    write("theirs", largest, code=code)
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()
    assert json.loads((tmp_path / "ours.json").read_text()) == {"vocab_size": vocab_size, "eos": 99}


@pytest.mark.parametrize("code", [4, 8])
def test_reader_reads_what_the_description_says(write, code):
    tokens = IndexedTokens(write("x", DOCUMENTS, code=code))
    assert tokens.tokens.tolist() == [*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]
    assert tokens.sizes.tolist() == [4, 1, 3]
    assert tokens.pointers.tolist() == [size * {4: 4, 8: 2}[code] for size in (0, 4, 5)]
    assert (len(tokens), tokens.vocab_size, tokens.eos) == (8, 100, 99)


@pytest.mark.parametrize(("token", "start"), [(0, 0), (1, 4), (4, 4), (5, 5), (6, 8), (8, 8)])
def test_next_document(write, token, start):
    assert IndexedTokens(write("x", DOCUMENTS)).document_at(token) == start


def test_documents_of_several_sequences(write):
    """Megatron-LM may cut a document into sentences; only its marks say where documents start."""
    tokens = IndexedTokens(write("x", DOCUMENTS, marks=[0, 2, 3]))
    assert [tokens.document_at(i) for i in (0, 1, 4, 5, 6)] == [0, 5, 5, 5, 8]


def test_foreign_file_without_metadata(write):
    tokens = IndexedTokens(write("x", DOCUMENTS, metadata=None))
    assert (tokens.vocab_size, tokens.eos) == (None, None)


def test_prefix_with_a_dot(tmp_path):
    save(tmp_path / "v1.5", DOCUMENTS)
    assert len(IndexedTokens(tmp_path / "v1.5")) == 8


def test_token_type_follows_megatron():
    assert [token_dtype(size).name for size in (257, 65499, 65500)] == ["uint16", "uint16", "int32"]


def damage(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


BAD = {
    "no idx": ("idx", lambda data: None, "x.idx is missing"),
    "no bin": ("bin", lambda data: None, "x.bin is missing"),
    "empty idx": ("idx", lambda data: b"", "0 bytes, fewer than its header"),
    "bad magic": ("idx", lambda data: damage(data, 0, b"TNTIDX"), "does not start with MMIDIDX"),
    "bad version": ("idx", lambda data: damage(data, 9, struct.pack("<Q", 2)), "version 2"),
    "float tokens": ("idx", lambda data: damage(data, 17, b"\x07"), "token type 7"),
    "truncated idx": ("idx", lambda data: data[:-1], "its header counts"),
    "truncated bin": ("bin", lambda data: data[:-1], "x.bin has 15 bytes, its .idx counts 16"),
    "other bin": ("bin", lambda data: data + b"\x00\x00", "x.bin has 18 bytes, its .idx counts 16"),
    "broken json": ("json", lambda data: data[:-1], "x.json is not a JSON object"),
    "json list": ("json", lambda data: b"[]", "x.json is not a JSON object"),
}


@pytest.mark.parametrize(("end", "change", "message"), BAD.values(), ids=BAD.keys())
def test_damage_is_named(write, end, change, message):
    path = Path(f"{write('x', DOCUMENTS)}.{end}")
    changed = change(path.read_bytes())
    path.unlink() if changed is None else path.write_bytes(changed)
    with pytest.raises(ConfigError, match=message) as caught:
        IndexedTokens(path.with_suffix(""))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("documents", [[], [[]]], ids=["no document", "empty document"])
def test_no_tokens_are_refused(write, documents):
    with pytest.raises(DataError, match="holds no tokens"):
        IndexedTokens(write("x", documents))


def test_nothing_has_its_name_before_the_end(tmp_path):
    save(tmp_path / "x", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with IndexedWriter(tmp_path / "x", 100) as writer:
        writer.add(np.array([1, 2, 99]), [3])
        assert IndexedTokens(tmp_path / "x").tokens.tolist() == [*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_to_write_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no text"), IndexedWriter(tmp_path / "x", 100) as writer:
        writer.finish({})
    assert list(tmp_path.iterdir()) == []
