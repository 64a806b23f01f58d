"""Token files written by hand, byte for byte as the format's description says, so that the package's own writer is not
its own witness."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.data.indexed import IndexedTokens

EOS = 99
WriteTokens = Callable[..., str]


def write_by_hand(
    prefix: Path,
    documents: list[list[int]],
    *,
    metadata: dict | None = None,
    code: int = 8,
    marks: list[int] | None = None,
) -> str:
    letter = {8: "H", 7: "f", 4: "i", 1: "B"}[code]
    size = struct.calcsize(letter)
    lengths = [len(document) for document in documents]
    marks = list(range(len(documents) + 1)) if marks is None else marks
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            file.write(struct.pack(f"<{len(document)}{letter}", *document))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(marks)))
        file.write(struct.pack(f"<{len(documents)}i", *lengths))
        file.write(struct.pack(f"<{len(documents)}q", *(size * sum(lengths[:i]) for i in range(len(documents)))))
        file.write(struct.pack(f"<{len(marks)}q", *marks))
    if metadata is not None:
        Path(f"{prefix}.json").write_text(json.dumps(metadata))
    return str(prefix)


@pytest.fixture
def write(tmp_path: Path) -> WriteTokens:
    """write(name, documents, …) → PREFIX; by default of 100 tokens, EOS 99."""

    def make(name: str, documents: list[list[int]], **options) -> str:
        return write_by_hand(tmp_path / name, documents, **{"metadata": {"vocab_size": 100, "eos": EOS}} | options)

    return make


@pytest.fixture
def counting(write: WriteTokens) -> Callable[..., IndexedTokens]:
    """A token file of tokens first, first + 1, …: the content of a sample says where it lies."""

    def make(name: str, tokens: int, first: int = 0, document: int = 7) -> IndexedTokens:
        values = list(range(first, first + tokens))
        documents = [values[i : i + document] for i in range(0, tokens, document)]
        return IndexedTokens(write(name, documents, code=4))

    return make


@pytest.fixture
def chats(write: WriteTokens) -> Callable[..., str]:
    """chats(name, sizes) → PREFIX of a chat file with documents of these sizes: tokens first, first + 1, …, of which
    odd ones count."""

    def make(name: str, sizes: list[int], first: int = 0) -> str:
        values = iter(range(first, first + sum(sizes)))
        documents = [[next(values) for _ in range(size)] for size in sizes]
        write(f"{name}.loss", [[token % 2 for token in document] for document in documents], code=1, metadata=None)
        return write(name, documents, code=4, metadata={"vocab_size": 100, "eos": EOS, "chat": {}})

    return make


@pytest.fixture
def preferences(write: WriteTokens) -> Callable[..., str]:
    """preferences(name, sizes, kind) → PREFIX of preferences with documents of these sizes: tokens first, first + 1, …,
    of which the last two are the completion. Every other document is rejected."""

    def make(name: str, sizes: list[int], kind: str = "pairs", first: int = 0) -> str:
        values = iter(range(first, first + sum(sizes)))
        documents = [[next(values) for _ in range(size)] for size in sizes]
        loss = [[0] * (size - 2) + [1 + i % 2] * 2 for i, size in enumerate(sizes)]
        write(f"{name}.loss", loss, code=1, metadata=None)
        metadata = {"vocab_size": 1000, "eos": EOS, "chat": {}, "preference": kind}
        return write(name, documents, code=4, metadata=metadata)

    return make
