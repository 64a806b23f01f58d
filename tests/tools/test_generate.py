"""tools/generate.py: a model that knows one sentence by heart, trained on tensor- and pipeline-parallel ranks, says it in one process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.batch import Microbatch
from megalite.checkpoint.manifest import encode
from megalite.config.load import from_dict
from tests.distributed.pool import RankPool
from tests.tools.jobs import train_and_save
from tools.generating import LanguageModel, Sampling, draw, in_one_process
from tools.preparing.writing import IndexedWriter
from tools.tokenizing import ByteTokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate.py"
SENTENCE = "Every café at six: quick brown foxes jump over lazy dogs."
LONGEST = 40


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that has read nothing but the sentence, each time to its end."""
    directory = tmp_path_factory.mktemp("memorised")
    document = [*ByteTokenizer().encode(SENTENCE), ByteTokenizer().eos]
    with IndexedWriter(directory / "sentence", 257) as writer:
        writer.add(np.array(document * 40), [len(document)] * 40)
        writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte"})
    model = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 257}
    config = {
        "run": {"dir": str(directory), "name": "run"},
        "model": {**model, "max_position_embeddings": LONGEST, "tie_word_embeddings": True},
        "parallel": {"tp": 2, "pp": 2, "dp": 1, "sequence_parallel": True},
        "data": {"train": str(directory / "sentence"), "sequence_length": LONGEST},
        "train": {"steps": 120, "global_batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"lr": 2e-2, "warmup_steps": 5, "weight_decay": 0.0},
    }
    saved, loss = ranks.run(4, train_and_save, config)[0]
    assert loss < 0.3, "the model has not learned the sentence"
    return Path(saved)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageModel:
    return LanguageModel(checkpoint)


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments) → the one message of a run that must end with status 2 and print nothing else."""
    monkeypatch.syspath_prepend(TOOL.parent)
    main = importlib.import_module("generate").main

    def call(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments), "--prompt", "x"])
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
        return err

    return call


def test_the_sentence_continues_greedily_to_its_end(checkpoint: Path) -> None:
    """From the run's directory, past the longest sequence that the model takes at once (a few letters more than it), until EOS."""
    done = tool(checkpoint.parents[1], "--prompt", "Every caf", "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["continuation"] == SENTENCE.removeprefix("Every caf")
    assert result["tokens"][-1] == 256
    assert result["ended_document"]
    assert result["step"] == 120


def test_the_continuation_alone_is_printed_and_is_as_long_as_asked(checkpoint: Path) -> None:
    done = tool(checkpoint, "--prompt", "Every c", "--temperature", "0", "--tokens", "5", "--tokenizer", "byte")
    assert (done.returncode, done.stdout) == (0, "afé \n"), done.stderr  # é is two bytes


def test_a_long_prompt_counts_only_in_its_last_window(model: LanguageModel) -> None:
    """The window is all that the model has positions for; inside it every token counts."""
    tokens = ByteTokenizer().encode(3 * SENTENCE)
    logits = model.next_logits(tokens)
    assert logits.shape == (257,)
    assert logits.equal(model.next_logits(tokens[-LONGEST:]))
    assert not logits.equal(model.next_logits(tokens[1 - LONGEST :]))


def test_padding_behind_the_last_token_changes_nothing(model: LanguageModel) -> None:
    """Each prefix gives the logits that the model computes for it at its own length, without padding."""
    ids = ByteTokenizer().encode(SENTENCE)[:LONGEST]
    for count in (1, 7, LONGEST - 1, LONGEST):
        tokens = torch.tensor(ids[:count]).unsqueeze(1)
        stage = model._stage
        with torch.no_grad():
            context = stage.context(Microbatch(tokens, tokens, torch.zeros(1, dtype=torch.int64)), 0, False)
            expected = stage.logits(tokens, context)[-1, 0, :257]
        torch.testing.assert_close(model.next_logits(ids[:count]), expected, rtol=1e-5, atol=1e-5)


def test_draws_follow_their_seed_and_their_limits(model: LanguageModel) -> None:
    prompt = ByteTokenizer().encode("Eve")

    def generate(temperature: float, top_k: int, seed: int, vocab_size: int = 0) -> list[int]:
        return model.generate(prompt, 24, Sampling(temperature, top_k, seed), vocab_size=vocab_size)

    assert generate(9.0, 0, 1) == generate(9.0, 0, 1)
    assert generate(9.0, 0, 1) != generate(9.0, 0, 2)
    assert generate(9.0, 1, 1) == generate(0.0, 0, 2) == generate(1e-30, 0, 3)
    assert len(set(generate(1e6, 3, 1))) > 3  # three other ones at each step
    assert max(generate(1e6, 0, 1)) >= 100 > max(generate(1e6, 0, 1, vocab_size=100))


def test_draws_have_the_probabilities_of_the_logits() -> None:
    """Frequencies of many draws against softmax(logits / temperature) over the two most likely of three tokens."""
    logits = torch.tensor([2.0, -1.0, 1.0])
    draws = torch.Generator().manual_seed(0)
    drawn = [draw(logits, Sampling(temperature=2.0, top_k=2), draws) for _ in range(4000)]
    expected = 1 / (1 + 2.718281828 ** ((1.0 - 2.0) / 2.0))
    assert drawn.count(0) / len(drawn) == pytest.approx(expected, abs=0.03)
    assert drawn.count(1) == 0


def test_only_weights_are_allocated(model: LanguageModel) -> None:
    assert all(memory.gradients is None and not memory.weights.requires_grad for memory in model._stage.weights.buckets)
    bf16 = from_dict({"train": {"precision": "bf16"}, "parallel": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True}})
    assert in_one_process(bf16).train.precision == "fp32"  # master weights are what a checkpoint holds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens 0: there must be at least one token"),
        (["--temperature", "-1"], "--temperature -1.0 is not a number from 0 up"),
        (["--temperature", "nan"], "--temperature nan is not a number from 0 up"),
        (["--top_k", "-3"], "--top_k -3 is negative"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_wrong_options_end_with_one_message(arguments: list[str], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("nowhere", *arguments)


def test_what_can_not_be_loaded_ends_with_one_message(checkpoint: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "manifest.json").write_text(encode({}, {}))
    wrong: dict[str, list[str | Path]] = {
        "is not a checkpoint: there is no such directory": [tmp_path / "nowhere"],
        "holds no configuration": [tmp_path],
        "--tokenizer none.model does not exist": [checkpoint, "--tokenizer", "none.model"],
    }
    for message, arguments in wrong.items():
        assert message in refusal(*arguments)
