"""One measured preparation of a .jsonl: by megalite, Megatron-LM, datatrove, or the tokenizer alone."""

from __future__ import annotations

import json
import multiprocessing
import resource
from array import array
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.measure import finish, read_spec

# documents of a call; datatrove's default of 10,000 takes more than 10 GB of memory for documents as long as
# these
BATCH = 1_000
CHUNK = 32  # lines sent at once, Megatron-LM's
ALONE_BYTES = 16_000_000  # of input, read before the clock starts


def megalite(spec: dict[str, Any]) -> int:
    """Run `megalite prepare`, without starting its process."""
    from megalite.data.preparation.prepare import prepare
    from megalite.data.preparation.sources import open_inputs

    sources = open_inputs([spec["input"]], exclude=[], file_format="auto", text_key="text", split="train")
    return prepare(
        sources, Path(spec["output"], "x"), spec["tokenizer"], workers=spec["workers"], overwrite=True
    ).tokens


_tokenizer: list[Any] = []  # of a worker


def _load_with_transformers(directory: str) -> None:
    from transformers import AutoTokenizer

    _tokenizer.append(AutoTokenizer.from_pretrained(directory))


def _encode_line(line: str) -> tuple[list[int], int]:
    """Return the tokens of a line and its length, like the workers of Megatron-LM."""
    tokenizer = _tokenizer[0]
    ids = tokenizer(json.loads(line)["text"]).input_ids
    ids.append(tokenizer.eos_token_id)
    return ids, len(line)


def megatron(spec: dict[str, Any]) -> int:
    """Run the loop of Megatron-LM's tools/preprocess_data.py.

    One process reads lines and writes, and a pool tokenizes each line separately.
    """
    total = 0
    with (
        Path(spec["input"]).open(encoding="utf-8") as lines,
        Path(spec["output"], "x.bin").open("wb") as out,
        multiprocessing.Pool(spec["workers"], _load_with_transformers, (spec["tokenizer"],)) as pool,
    ):
        sizes = array("i")
        for ids, _ in pool.imap(_encode_line, lines, CHUNK):
            out.write(np.array(ids, np.uint16).tobytes())
            sizes.append(len(ids))
            total += len(ids)
    return total


def datatrove(spec: dict[str, Any]) -> int:
    """Run datatrove's tokenization of a folder of shards, one per worker, without merging its results."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    out = Path(spec["output"])
    steps = [
        JsonlReader(spec["shards"], glob_pattern="*.jsonl"),
        DocumentTokenizer(
            str(out),
            str(Path(spec["tokenizer"], "tokenizer.json")),
            eos_token=spec["eos"],
            shuffle_documents=False,
            batch_size=BATCH,
        ),
    ]
    # whose processor time is seen here
    running = {"tasks": spec["workers"], "workers": spec["workers"], "start_method": "spawn"}
    LocalPipelineExecutor(steps, logging_dir=str(out / "logs"), **running).run()
    return sum(path.stat().st_size for path in out.glob("*.ds")) // 2


def _encode_shard(spec: dict[str, Any], shard: Path) -> int:
    from tokenizers import Tokenizer

    tokenizer, total = Tokenizer.from_file(str(Path(spec["tokenizer"], "tokenizer.json"))), 0
    with shard.open(encoding="utf-8") as lines, Path(spec["output"], f"{shard.stem}.ds").open("wb") as out:
        while batch := [json.loads(line)["text"] for line in islice(lines, BATCH)]:
            for encoding in tokenizer.encode_batch(batch):
                ids = [*encoding.ids, tokenizer.token_to_id(spec["eos"])]
                out.write(np.array(ids, np.uint16).tobytes())
                total += len(ids)
    return total


def datatrove_loop(spec: dict[str, Any]) -> int:
    """Run the loop of datatrove, for use if it is not installed.

    Each process reads a shard, and tokenizes batches of documents.
    """
    shards = sorted(Path(spec["shards"]).glob("*.jsonl"))
    with multiprocessing.Pool(spec["workers"]) as pool:
        return sum(pool.starmap(_encode_shard, [(spec, shard) for shard in shards]))


def _sample(path: str) -> tuple[list[str], int]:
    """Return texts at equal distances, of about ALONE_BYTES of input, and their bytes."""
    every = -(-Path(path).stat().st_size // ALONE_BYTES)
    with Path(path).open(encoding="utf-8") as lines:
        chosen = list(islice(lines, 0, None, every))
    return [json.loads(line)["text"] for line in chosen], sum(len(line.encode()) for line in chosen)


def alone(spec: dict[str, Any]) -> tuple[float, float, int]:
    """Run the tokenizer in one process on texts in memory.

    Returns:
        seconds of the clock and of the processor for ALONE_BYTES of input, and the bytes.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(spec["tokenizer"], "tokenizer.json")))
    texts, size = _sample(spec["input"])
    started, before = perf_counter(), _processor_seconds()
    for first in range(0, len(texts), 32):
        tokenizer.encode_batch_fast(texts[first : first + 32], add_special_tokens=False)
    return perf_counter() - started, _processor_seconds() - before, size


def _processor_seconds() -> float:
    """Return the processor seconds of this process and of the processes that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """Prepare with one method. Return wall-clock and processor seconds, input bytes and tokens."""
    if spec["way"] == "alone":
        seconds, cpu, size = alone(spec)
        return {"seconds": seconds, "cpu_s": cpu, "bytes": size, "tokens": None}
    ways = {
        "megalite": megalite,
        "megatron": megatron,
        "datatrove": datatrove if find_spec("datatrove") is not None else datatrove_loop,
    }
    started, before = perf_counter(), _processor_seconds()
    tokens = ways[spec["way"]](spec)
    return {
        "seconds": perf_counter() - started,
        "cpu_s": _processor_seconds() - before,
        "bytes": Path(spec["input"]).stat().st_size,
        "tokens": tokens,
    }


if __name__ == "__main__":
    of_process = read_spec()
    finish(of_process, measured(of_process))
