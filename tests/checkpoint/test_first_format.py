"""A checkpoint that an early version wrote is resumed by every later one, on any layout, with the numbers that the
early one went on with.

first_format/ is what a run of four ranks (tp 2, dp 2, ZeRO-1, sequence parallelism, fp64) has left: config.yaml, the
checkpoint of step 3, and metrics.jsonl with the six steps of the run. It is never written anew: that it stays readable
is what format 1 promises. Everything here goes through command lines, so that nothing but that promise has to stay.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.support import forked_programs

ROOT, KEPT = Path(__file__).parents[2], Path(__file__).parent / "first_format"
CHECKPOINT, SAVED, STEPS = KEPT / "step_00000003", 3, 6
TOKENS, DOCUMENT, VOCABULARY, EOS = 4000, 29, 61, 0
LAYOUTS = {
    "one process": {},
    "tp2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2 dp2, ZeRO-3": {"pp": 2, "dp": 2, "zero": 3},
}


def write_tokens(prefix: Path) -> None:
    """The run's token file, byte for byte, by Megatron-LM's format and integer arithmetic alone."""
    tokens, value = [], 1
    for place in range(TOKENS):
        value = (value * 1103515245 + 12345) % 2**31
        tokens.append(EOS if place % DOCUMENT == DOCUMENT - 1 else 1 + (value >> 20) % 60 * ((value >> 10) % 60) // 60)
    sizes = [DOCUMENT] * (TOKENS // DOCUMENT) + [TOKENS % DOCUMENT]
    count = len(sizes)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
    index += struct.pack(f"<{count}i", *sizes) + struct.pack(
        f"<{count}q", *(2 * DOCUMENT * number for number in range(count))
    )
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{TOKENS}H", *tokens))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".json").write_text(json.dumps({"vocab_size": VOCABULARY, "eos": EOS}))


def python(*words: str, ranks: int = 1, cwd: Path = ROOT) -> str:
    succeeded, output = forked_programs.run(words, ranks, cwd, {"CUDA_VISIBLE_DEVICES": ""})  # fp64 is for CPUs
    assert succeeded, output
    return output


def train(directory: Path, world: int, options: dict[str, object]) -> list[dict]:
    """Run pretrain.py in a directory; the lines of its metrics."""
    write_tokens(directory / "tokens")
    given = [
        part
        for option, value in options.items()
        for part in (f"--{option}", str(value).lower() if value is True else str(value))
    ]
    output = python(
        str(ROOT / "pretrain.py"), "--config", str(KEPT / "config.yaml"), *given, ranks=world, cwd=directory
    )
    assert "_dtype" not in output, "the former name of a value is no change, and no advice"
    return lines_of(directory / "runs" / "first" / "metrics.jsonl")


def lines_of(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_early_checkpoint_goes_on_with_its_numbers(layout: dict, tmp_path: Path):
    sizes = {"tp": 1, "pp": 1, "dp": 1, "zero": 1, "sequence_parallel": "false", **layout}
    options = {f"parallel.{name}": value for name, value in sizes.items()} | {"checkpoint.load": CHECKPOINT}
    continued = train(tmp_path, sizes["tp"] * sizes["pp"] * sizes["dp"], options)
    expected = [line for line in lines_of(KEPT / "metrics.jsonl") if line["step"] > SAVED]
    assert (
        [line["step"] for line in continued] == [line["step"] for line in expected] == list(range(SAVED + 1, STEPS + 1))
    )
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in continued] == pytest.approx([line[key] for line in expected], rel=1e-9, abs=0), (
            key
        )


def test_the_tool_finds_every_byte_of_an_early_checkpoint():
    python("tools/checkpoint.py", "verify", str(CHECKPOINT))
