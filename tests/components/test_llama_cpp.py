"""GGUF files in llama.cpp: logits and greedy tokens of random models equal those of transformers, and texts of many
scripts have the ids of the tokenizer that was exported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import category

import pytest
import torch
from torch import Tensor

from megalite.commands import convert
from megalite.gguf.pretokenizers import PRETOKENIZERS
from megalite.huggingface.convert import import_model
from tests.components.environments import python_of
from tests.gguf.gguf_cases import CASES, compared, tokenizers
from tests.gguf.texts import LINES
from tests.huggingface.hf_models import load, random_ids, write

PROGRAM = Path(__file__).with_name("llama_program.py")
GENERATED = 8
# llama.cpp rounds the GELU of feed-forwards to fp16, and bounds lengths of keys where delta blocks add an epsilon
TOLERANCES = {"gelu": 2e-3, "delta": 2e-4}
TOLERANCE = 2e-5
MARKS = ("tekken", "gpt-4o")  # llama.cpp's patterns of these take combining marks for no letters


def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of llama.cpp, one for each job."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python_of("llama"), PROGRAM], input=json.dumps(jobs), capture_output=True, text=True, env=outside, timeout=300
    )
    assert done.returncode == 0, f"llama.cpp ended: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def exported(directory: Path, *options: str) -> Path:
    """The file of a checkpoint, by the command."""
    path = directory / "model.gguf"
    assert convert.main(["export", str(directory / "checkpoint"), str(path), "--format", "gguf", *options]) == 0
    return path


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The tokens that greedy decoding adds to a prompt in transformers, without a cache."""
    ids = torch.tensor([prompt])
    for _ in range(GENERATED):
        with torch.no_grad():
            last = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


class Expected(NamedTuple):
    logits: Tensor  # [rows, tokens, vocabulary]
    generated: list[int]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Expected, dict[str, Any]]]:
    """Case → what transformers and llama.cpp compute."""
    jobs, expected = [], {}
    ids = random_ids(rows=1)
    for number, (name, case) in enumerate(CASES.items()):
        directory = tmp_path_factory.mktemp(f"case{number}")
        import_model(write(case, directory / "hf"), directory / "checkpoint")
        model = load(directory / "hf")
        prompt = ids[0, : compared(name) - GENERATED].tolist()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        expected[name] = Expected(logits, greedy(model, prompt))
        path = exported(directory, "--dtype", "f32")
        jobs.append({"path": str(path), "rows": [prompt, ids[0].tolist()], "generate": GENERATED})
    return {name: (expected[name], answer) for name, answer in zip(expected, run(jobs), strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_computes_what_transformers_does(name: str, answers: dict[str, tuple[Expected, dict[str, Any]]]) -> None:
    (logits, generated), answer = answers[name]
    assert "error" not in answer, answer
    shown = compared(name)
    tolerance = next((value for part, value in TOLERANCES.items() if part in name), TOLERANCE)
    torch.testing.assert_close(torch.tensor(answer["logits"][1:])[:, :shown], logits[:, :shown], rtol=0, atol=tolerance)
    assert answer["generated"] == generated


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """Tokenizer → the ids that it and llama.cpp give to each line."""
    jobs, expected = [], {}
    for name, tokenizer in tokenizers(tmp_path_factory.mktemp("tokenizers")).items():
        directory = tmp_path_factory.mktemp("model")
        import_model(tokenizer.model(directory / "hf"), directory / "checkpoint")
        path = exported(directory, "--tokenizer", str(tokenizer.path), "--dtype", "f16")
        jobs.append({"path": str(path), "texts": LINES})
        expected[name] = [list(tokenizer.encode(line)) for line in LINES]
    return {name: (expected[name], answer["ids"]) for name, answer in zip(expected, run(jobs), strict=True)}


@pytest.mark.parametrize("name", [*PRETOKENIZERS, "byte", "sentencepiece", "sentencepiece, tokenizer.json", "added"])
def test_texts_of_many_scripts_have_the_same_ids(
    name: str, tokenized: dict[str, tuple[list[list[int]], list[list[int]]]]
) -> None:
    expected, answer = tokenized[name]
    for line, ours, theirs in zip(LINES, expected, answer, strict=True):
        if not (name in MARKS and any(category(letter)[0] == "M" for letter in line)):
            assert theirs == ours, line
