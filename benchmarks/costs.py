"""Processor time around training: start of ranks, first step, saves and loads, preparation, conversion.

    python -m benchmarks.costs --tree . [--tree OTHER] [--times 5] [phases] [ranks] [prepare] [convert]

Trees are measured alternately, after one round that compiles bytecode and fills caches. The printed medians
are in seconds of all processes and threads (user and system), which other work on the machine affects little.
`phases` is one process, `ranks` eight on TP2 × PP2 × DP2 with their launcher: one step and its save, then a
load, a step and a save.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import prepare, report, step

RUN = Path(__file__).with_name("costs_run.py")
MODEL = [
    "--model.preset",
    "tiny",
    "--data.sequence_length",
    "64",
    "--train.global_batch_size",
    "16",
    "--train.micro_batch_size",
    "2",
]
SHAPE: dict[str, Any] = {  # of the model that is converted
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **step.MODEL,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def spent(tree: Path, *words: str) -> tuple[float, str]:
    """Return the processor seconds of `python WORDS` and its child processes, and its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed in {tree}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def phases(tree: Path, scratch: Path) -> Iterator[tuple[str, float]]:
    data, runs = str(scratch / "random_257"), str(scratch / "runs")
    _, output = spent(tree, str(RUN), *MODEL, "--data.train", data, "--run.dir", runs, "--train.steps", "10")
    yield from json.loads(output.splitlines()[-1]).items()


def ranks(tree: Path, scratch: Path) -> Iterator[tuple[str, float]]:
    data, runs = str(scratch / "random_257"), str(scratch / "runs")
    layout = [
        "--nproc",
        "8",
        "--tp",
        "2",
        "--pp",
        "2",
        "--dp",
        "2",
        *MODEL,
        "--data.train",
        data,
        "--run.dir",
        runs,
    ]
    command = [
        "-m",
        "megalite",
        "train",
        *layout,
        "--optimizer.decay",
        "constant",
        "--checkpoint.allow",
        "horizon",
    ]
    yield "eight ranks: start, a step, a save", spent(tree, *command, "--train.steps", "1")[0]
    yield "eight ranks: start, a load, a step, a save", spent(tree, *command, "--train.steps", "2")[0]


def prepared(tree: Path, scratch: Path) -> Iterator[tuple[str, float]]:
    """Yield preparations in this process and with two workers.

    The data is one file of text as bytes, and the same as JSON with a BPE of 32,000 tokens.
    """
    for name, tokenizer in (("bytes", "byte"), ("BPE", str(scratch / "tokenizer"))):
        for workers in ("1", "2"):
            words = [
                "--input",
                str(scratch / "text.jsonl"),
                "--tokenizer",
                tokenizer,
                "--workers",
                workers,
                "--overwrite",
            ]
            out = str(scratch / "runs" / "prepared")
            yield (
                f"prepare {name}, {workers} workers",
                spent(tree, "-m", "megalite", "prepare", *words, "--output", out)[0],
            )


def converted(tree: Path, scratch: Path) -> Iterator[tuple[str, float]]:
    """Yield conversions of a Llama with 25M parameters in fp32."""
    place, source = scratch / "runs", str(scratch / "llama")
    yield (
        "convert import",
        spent(tree, "-m", "megalite", "convert", "import", source, str(place / "imported"))[0],
    )
    yield (
        "convert export",
        spent(tree, "-m", "megalite", "convert", "export", str(place / "imported"), str(place / "exported"))[
            0
        ],
    )


PARTS: dict[str, Callable[[Path, Path], Iterator[tuple[str, float]]]] = {
    "phases": phases,
    "ranks": ranks,
    "prepare": prepared,
    "convert": converted,
}


def write_inputs(scratch: Path, parts: list[str], megabytes: float) -> None:
    report.write_random_tokens(scratch, 257, 100_000)
    if "prepare" in parts:
        prepare.write_text(scratch, int(megabytes * 1e6), 1)
        prepare.train_tokenizer(scratch / "tokenizer", prepare.VOCABULARY, prepare.TRAINING_TEXTS)
    if "convert" in parts:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(scratch / "llama")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, action="append", required=True, metavar="DIR")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of text to prepare (default 8)")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default all)")
    options = parser.parse_args()
    trees, parts = [tree.resolve() for tree in options.tree], options.parts or list(PARTS)
    seconds_by_phase: dict[str, dict[Path, list[float]]] = {}
    with TemporaryDirectory(prefix="megalite_costs_") as name:
        scratch = Path(name)
        write_inputs(scratch, parts, options.megabytes)
        for number in range(options.times + 1):
            for part in parts:
                for tree in trees[:: 1 if number % 2 else -1]:
                    for row, seconds in PARTS[part](tree, scratch):
                        seconds_by_phase.setdefault(row, {each: [] for each in trees})[tree] += (
                            [seconds] if number else []
                        )
                    shutil.rmtree(scratch / "runs", ignore_errors=True)
    for row, values in seconds_by_phase.items():
        print(f"{row:45}" + "".join(f"{median(each):9.3f}" for each in values.values()))


if __name__ == "__main__":
    main()
