"""Preparation of a .jsonl by several processes, compared with Megatron-LM and datatrove.

The text is the source of Python's standard library, repeated with different names; the tokenizer is a
byte-level BPE with 32,000 tokens that is trained on it. Each method runs in a separate process, alternating
with the others, and its time includes reading, tokenizing and writing. Processor seconds show the cost
independently of other work on the machine.

Megatron-LM's preprocess_data.py is not part of its package, so its loop is reimplemented and measured here.
datatrove is measured if it is installed, otherwise its loop is. The tokenizer alone, on texts in memory in
one process, is the limit of each worker.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report

VOCABULARY, EOS = 32_000, "<|endoftext|>"
TRAINING_TEXTS = 600  # files
COLUMNS = {
    "way": "way",
    "MB/s": "mb_per_second:.2f",
    "seconds": "seconds:.1f",
    "MB per processor second": "mb_per_cpu_second:.2f",
    "million tokens": "million_tokens:.1f",
    "megalite is": "ratio:.2f",
}


def compare(
    *, megabytes: int, workers: int | None, rounds: int, smoke: bool, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    size, workers = 200_000 if smoke else megabytes * 1_000_000, workers or report.cores()
    names = {
        "megalite": "megalite",
        "megatron": "Megatron-LM's loop (own measurement of the same loop)",
        "alone": "tokenizer alone, one process",
    }
    names["datatrove"] = (
        "datatrove"
        if find_spec("datatrove") is not None
        else "datatrove's loop (own measurement of the same loop)"
    )
    by_way: dict[str, list[dict[str, Any]]] = {
        way: [] for way in ("megalite", "megatron", "datatrove", "alone")
    }
    # on a disk: /tmp may be in memory
    with TemporaryDirectory(prefix="megalite_benchmark_", dir=Path.cwd()) as scratch:
        directory = Path(scratch)
        progress(f"writing {size / 1e6:.0f} MB of text and training a tokenizer")
        train_tokenizer(directory / "tokenizer", 500 if smoke else VOCABULARY, 5 if smoke else TRAINING_TEXTS)
        write_text(directory, size, workers)
        spec = {
            "input": str(directory / "text.jsonl"),
            "shards": str(directory / "shards"),
            "tokenizer": str(directory / "tokenizer"),
        }
        for number in range(1, rounds + 1):
            for way, results in by_way.items():
                progress(f"round {number} of {rounds}: {names[way]}")
                out = directory / "out"
                out.mkdir()
                one = {**spec, "way": way, "output": str(out), "workers": workers, "eos": EOS}
                results.append(report.launch("benchmarks.prepare_run", one, threads=1, limit_s=7200))
                rmtree(out)
    rows = rows_of(by_way, names)
    return {
        "threads": 1,
        "workers": workers,
        "packages": {name: report.version(name) for name in ("tokenizers", "datatrove")},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "config": {
            "bytes": size,
            "text": "Python's standard library, repeated with other names",
            "vocabulary": VOCABULARY,
        },
        "protocol": {
            "rounds": rounds,
            "seconds": "from reading the first byte to the published files, workers' start included",
        },
        "results": rows,
        "targets": targets(rows),
    }


def rows_of(by_way: dict[str, list[dict[str, Any]]], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each method, from the medians of its rounds.

    `ratio` is megalite's speed over that of the method.
    """
    speeds = {
        way: median(each["bytes"] / 1e6 / each["seconds"] for each in results)
        for way, results in by_way.items()
    }
    return [
        {
            "way": names[way],
            "mb_per_second": speeds[way],
            "mb_per_cpu_second": median(each["bytes"] / 1e6 / each["cpu_s"] for each in results),
            "seconds": median(each["seconds"] for each in results),
            "million_tokens": None if results[0]["tokens"] is None else results[0]["tokens"] / 1e6,
            "ratio": speeds["megalite"] / speeds[way],
            "rounds": [each["seconds"] for each in results],
        }
        for way, results in by_way.items()
    ]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets: nearly the speed of the tokenizer, and at least that of the peers.

    Speeds are per processor second, which other work affects least.
    """
    ours, *others = (row["mb_per_cpu_second"] for row in rows)
    wanted = zip(
        ("Megatron-LM's loop", "datatrove", "tokenizer alone"), others, (1.0, 1.0, 0.85), strict=True
    )
    return [
        {
            "target": f"megalite / {name}, MB per processor second",
            "measured": ours / theirs,
            "wanted": f"≥ {limit}",
            "met": ours / theirs >= limit,
        }
        for name, theirs, limit in wanted
    ]


def library() -> Iterator[str]:
    """Yield the source files of Python's standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and (text := path.read_text(encoding="utf-8", errors="replace")):
            yield text


def write_text(directory: Path, size: int, shards: int) -> None:
    """Write text.jsonl with about `size` bytes, and its lines distributed to shards/*.jsonl.

    There is one shard for each worker of methods that read one file per worker.
    """
    (directory / "shards").mkdir()
    files = [
        (directory / "shards" / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(shards)
    ]
    texts, written, passes, line_number = list(library()), 0, 0, 0
    with (directory / "text.jsonl").open("w", encoding="utf-8") as whole:
        while written < size:
            for text in texts:
                varied = (
                    text if not passes else text.replace("self", f"self{passes}").replace("_", f"_{passes}_")
                )
                line = json.dumps({"text": varied}) + "\n"
                whole.write(line)
                files[line_number % shards].write(line)
                line_number += 1
                written += len(line)
                if written >= size:
                    break
            passes += 1
    for file in files:
        file.close()


def train_tokenizer(directory: Path, vocabulary: int, texts: int) -> None:
    """Train a byte-level BPE, and write it to a Hugging Face directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for text, _ in zip(library(), range(texts), strict=False)), trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
