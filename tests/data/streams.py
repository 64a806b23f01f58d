"""Streams of each format, written by their own libraries or by hand, byte for byte as the formats' descriptions say."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TEXTS = [f"{i}: " + "grüße der Welt; x = 1\n" * (i * 7 % 11) + "日本" * (i % 3) for i in range(60)]
TEXTS[7] = ""
SHARDS = 6


def shares(texts: Sequence[str] = TEXTS, shards: int = SHARDS) -> list[list[str]]:
    """The documents of each shard: consecutive ones, 10 in each."""
    size = -(-len(texts) // shards)
    return [list(texts[i : i + size]) for i in range(0, len(texts), size)]


def write_jsonl(directory: Path, parts: list[list[str]]) -> str:
    for number, texts in enumerate(parts):
        lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
        (directory / f"part-{number:03}.jsonl").write_bytes(gzip.compress(lines) if number == 1 else lines)
    return f"jsonl:{directory}/part-*.jsonl"


def write_parquet(directory: Path, parts: list[list[str]]) -> str:
    import pyarrow
    from pyarrow import parquet

    for number, texts in enumerate(parts):
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        parquet.write_table(table, directory / f"part-{number}.parquet", row_group_size=4)
    return f"parquet:{directory}/part-{{0..{len(parts) - 1}}}.parquet"


def write_webdataset(directory: Path, parts: list[list[str]]) -> str:
    """Text members in some shards, JSON in others, with other members between them."""
    import webdataset

    for number, texts in enumerate(parts):
        name = directory / f"part-{number:06}.tar{'.gz' if number == 2 else ''}"
        with webdataset.TarWriter(str(name)) as writer:
            for i, text in enumerate(texts):
                content = {"txt": text} if number % 2 else {"json": {"text": text, "id": i}}
                writer.write({"__key__": f"a/sample{i:04}", "cls": i, **content, "png": b"\x89PNG" * 200})
    return f"webdataset:{directory}/part-*.tar*"


def write_mds(directory: Path, parts: list[list[str]]) -> str:
    entries = []
    for number, texts in enumerate(parts):
        samples = []
        for i, text in enumerate(texts):
            columns = [str(i).encode(), struct.pack("<q", i), text.encode()]
            samples.append(struct.pack("<2I", len(columns[0]), len(columns[2])) + b"".join(columns))
        info: dict[str, Any] = {"column_encodings": ["str", "int", "str"], "column_names": ["a", "b", "text"]}
        info["column_sizes"] = [None, 8, None]
        header = json.dumps(info).encode()
        start = 4 + 4 * (len(texts) + 1) + len(header)
        offsets = [start + sum(map(len, samples[:i])) for i in range(len(samples) + 1)]
        raw = struct.pack(f"<{len(offsets) + 1}I", len(texts), *offsets) + header + b"".join(samples)
        name = f"shard.{number:05}.mds"
        entry = info | {"version": 2, "format": "mds", "compression": None, "hashes": [], "zip_data": None}
        entry |= {"samples": len(texts), "size_limit": 1 << 26}
        entries.append(entry | {"raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}})
        if number == 3:
            entries[-1] |= {"compression": "gz", "zip_data": {"basename": f"{name}.gz", "bytes": 1, "hashes": {}}}
            raw, name = gzip.compress(raw), f"{name}.gz"
        (directory / name).write_bytes(raw)
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return f"mds:{directory}"


WRITERS: dict[str, Callable[[Path, list[list[str]]], str]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "webdataset": write_webdataset,
    "mds": write_mds,
}
