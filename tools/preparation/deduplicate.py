"""Remove duplicates from .jsonl files with datatrove: equal texts, and near duplicates by MinHash.

    python tools/preparation/deduplicate.py corpus deduplicated --tasks 8
    megalite prepare --input 'deduplicated/*.jsonl' --tokenizer models/llama --output data/corpus

It runs in an environment with `datatrove[io,processing]` and spacy, and continues where it was interrupted.
Of equal texts one is kept, and one of a cluster of near duplicates: two texts are in one if all `--hashes`
MinHashes of their 5-grams of words are equal in one of `--buckets` buckets, which happens with probability
1 - (1 - s^hashes)^buckets for texts of similarity s.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.typeshelper import Languages

HASH = HashConfig(hash_fc="xxhash", precision=64)


def text_of(document: Any) -> bytes:
    return bytes(document.text, "utf-8")


def run(stage: str, pipeline: list[Any], tasks: int, options: argparse.Namespace) -> None:
    """Run a pipeline. Tasks that an earlier run has completed are skipped."""
    logs = str(options.work / "logs" / stage)
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=min(tasks, options.parallel), logging_dir=logs).run()


def exact(reader: Any, output: str, options: argparse.Namespace) -> None:
    """Write the documents of a reader without those whose text an earlier one has."""
    config = ExactDedupConfig(content_getter=text_of, hash_config=HASH)
    signatures, duplicates = str(options.work / "exact" / "signatures"), str(options.work / "exact" / "found")
    run("exact-1", [reader, ExactDedupSignature(signatures, config)], options.tasks, options)
    run("exact-2", [ExactFindDedups(signatures, duplicates, config)], 1, options)
    run("exact-3", [reader, ExactDedupFilter(duplicates, config), _writer(output)], options.tasks, options)


def minhash(reader: Any, output: str, options: argparse.Namespace) -> None:
    """Write the documents of a reader without near duplicates."""
    config = MinhashConfig(num_buckets=options.buckets, hashes_per_bucket=options.hashes, hash_config=HASH)
    place = options.work / "minhash"
    signatures, buckets, removed = (str(place / name) for name in ("signatures", "buckets", "removed"))
    words = Languages.english if options.language is None else options.language
    run("minhash-1", [reader, MinhashDedupSignature(signatures, config, words)], options.tasks, options)
    run("minhash-2", [MinhashDedupBuckets(signatures, buckets, config=config)], options.buckets, options)
    run("minhash-3", [MinhashDedupCluster(buckets, removed, config)], 1, options)
    run("minhash-4", [reader, MinhashDedupFilter(removed), _writer(output)], options.tasks, options)


def _reader(directory: str, options: argparse.Namespace) -> Any:
    return JsonlReader(directory, text_key=options.text_key, glob_pattern=options.glob, recursive=False)


def _writer(directory: str) -> Any:
    return JsonlWriter(directory, compression=None)  # shards of `megalite prepare` divide plain files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", help="directory of .jsonl files, which may be compressed; a path of fsspec")
    parser.add_argument("output", help="directory for the .jsonl files without duplicates, one for each task")
    parser.add_argument("--glob", default="*.jsonl*", help="the files of the directory (default *.jsonl*)")
    parser.add_argument("--text_key", default="text", help="the key of a record's text (default text)")
    parser.add_argument("--method", choices=["exact", "minhash", "both"], default="both")
    parser.add_argument("--language", help="language of the words, as datatrove names it (default English)")
    parser.add_argument("--buckets", type=int, default=14, help="buckets of MinHash (default 14)")
    parser.add_argument("--hashes", type=int, default=8, help="hashes of a bucket (default 8)")
    parser.add_argument("--tasks", type=int, default=1, help="parts of the input (default 1)")
    parser.add_argument("--parallel", type=int, default=1, help="tasks at the same time (default 1)")
    parser.add_argument("--work", type=Path, help="directory for signatures and logs (default OUTPUT.work)")
    options = parser.parse_args()
    options.work = options.work or Path(f"{options.output.rstrip('/')}.work")
    reader = _reader(options.input, options)
    if options.method == "both":
        middle = str(options.work / "unequal")
        exact(reader, middle, options)
        options.text_key, options.glob = "text", "*.jsonl"
        reader = _reader(middle, options)
    (exact if options.method == "exact" else minhash)(reader, options.output, options)


if __name__ == "__main__":
    main()
