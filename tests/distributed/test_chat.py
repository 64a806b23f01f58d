"""Training on conversations: packing changes no number, no conversation sees another, nothing is counted that should
not be."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.data.chat.template import ChatTemplate
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.writer import IndexedWriter
from megalite.data.tokenizer.tokenizers import load
from megalite.parallel.microbatch import Microbatch
from megalite.training.trainer import Trainer
from tests.data.chats import SHORT, write_lines
from tests.support import jobs, jobs_training

S = 24
LENGTHS = [5, 9, 14, 3, 25, 11, 8, 12, 6, 17, 4, 20]  # 122 inputs: six rows of 24
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(prefix: Path, lengths: list[int], share: float = 0.4, seed: int = 0, weighted: bool = False) -> str:
    """Random conversations of which about this share counts, each token as 1, or as ½, −½ or 2."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, 61, masked=True) as writer:
        tokens, counts = random.integers(1, 61, sum(lengths)), (random.random(sum(lengths)) < share).astype(np.uint8)
        weights = random.choice(np.array([0.5, -0.5, 2.0], np.float32), sum(lengths))
        writer.add(tokens, lengths, counts * weights if weighted else counts)
        writer.finish({"vocab_size": 61, "eos": 0, "chat": {}})
    return str(prefix)


def config(prefix: str, batch: int, **changes: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "run": {"dir": prefix + "_runs"},
        "model": {**MODEL, "vocab_size": 61, "max_position_embeddings": S},
        "parallel": {"dp": 1, "zero": 1},
        "data": {"train": prefix, "sequence_length": S, "shuffle": False},
        "train": {"steps": 8, "global_batch_size": batch, "micro_batch_size": 1, "grad_clip": 1.0},
        "optimizer": {"lr": 3e-4},
        "checkpoint": {"load": "none"},
    }
    for section, values in changes.items():
        options[section] = {**options.get(section, {}), **values}
    return options


def numbers(results: list[dict[str, Any]]) -> list[float]:
    return results[0]["losses"] + results[0]["grad_norms"]


@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2, "context": "ring"}], ids=str
)
def test_packed_is_unpacked_on_every_layout(layout, ranks, tmp_path):
    """Each step takes every conversation: in twelve rows of one, or six packed ones, whose tokens that count are
    unequal in number."""
    prefix = write(tmp_path / "x", LENGTHS)
    expected = numbers(ranks.run(1, jobs.train, config(prefix, 12), 3))
    for batch, packing in ((12, False), (6, True)):
        packed = config(prefix, batch, parallel=layout, data={"packing": packing})
        got = ranks.run(prod(layout.get(axis, 1) for axis in ("dp", "tp", "cp")), jobs.train, packed, 3)
        assert numbers(got) == pytest.approx(expected, rel=1e-5)


def test_a_mixture_of_experts_is_the_same_packed(ranks, tmp_path):
    """What a token does to the balance depends neither on its row nor on padding."""
    prefix = write(tmp_path / "x", LENGTHS)
    mixture = {"num_experts": 4, "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.01, "initializer_range": 0.2}
    model = {**MODEL, **mixture, "vocab_size": 61, "max_position_embeddings": S}
    expected = numbers(ranks.run(1, jobs.train, config(prefix, 12, model=model), 2))
    got = ranks.run(
        2, jobs.train, config(prefix, 6, model=model, parallel={"dp": 2, "ep": 2}, data={"packing": True}), 2
    )
    assert numbers(got) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sequence_parallel": True}, {"cp": 2, "context": "ring"}, {"pp": 2}], ids=str
)
def test_weighted_messages_are_the_same_on_every_layout(layout, ranks, references, tmp_path):
    """Packed, with a module of multi-token prediction, whose targets have the weights of their tokens; and with chunks
    of the loss."""
    prefix, model = write(tmp_path / "x", LENGTHS, weighted=True), {"mtp_layers": 1, **MODEL, "vocab_size": 61}
    train = {"precision": "fp64", "label_smoothing": 0.1, "z_loss": 1e-2, "global_batch_size": 6, "micro_batch_size": 2}
    options = {"model": model | {"max_position_embeddings": S}, "data": {"packing": True}}
    whole = config(prefix, 6, **options, train={"steps": 8, **train})
    expected = references.run(jobs.train, whole, 3)
    cut = config(prefix, 6, **options, train={"steps": 8, **train, "loss_chunk": 20}, parallel=layout)
    got = ranks.run(2, jobs.train, cut, 3)[0]
    for key in ("losses", "grad_norms", "mtp_losses"):
        assert got[key] == pytest.approx(expected[key], rel=1e-9), key
    unweighted = references.run(
        jobs.train, config(write(tmp_path / "y", LENGTHS), 6, **options, train=whole["train"]), 1
    )
    assert expected["mtp_losses"][0] != pytest.approx(unweighted["mtp_losses"][0], rel=0.1)


@pytest.mark.parametrize("weighted", [False, True], ids=["a mask", "weights"])
def test_the_loss_is_that_of_plain_logits(weighted, tmp_path):
    """Each conversation alone through the model, its counted tokens alone summed."""
    prefix = write(tmp_path / "x", LENGTHS, weighted=weighted)
    trainer = trainer_of(config(prefix, 6, data={"packing": True}))
    alone = trainer_of(config(prefix, 12))
    total, count = 0.0, 0
    for microbatch in alone.loader.step(0):
        counted = microbatch.targets[:, 0] >= 0
        losses = torch.nn.functional.cross_entropy(
            logits(alone, microbatch)[:, 0], microbatch.targets[:, 0], reduction="none"
        )
        weights = torch.ones_like(losses) if microbatch.weights is None else microbatch.weights[:, 0]
        assert weighted is (microbatch.weights is not None)
        total, count = total + (weights * losses)[counted].sum().item(), count + int(counted.sum())
    step = trainer.step()
    assert step.tokens == count and step.loss == pytest.approx(total / count, rel=1e-5)
    alone.close()
    trainer.close()


def trainer_of(options: dict[str, Any]) -> Trainer:
    parsed = from_dict(options)
    return Trainer(parsed, build.make_mesh(parsed))


@torch.no_grad()
def logits(trainer: Trainer, microbatch: Any) -> torch.Tensor:
    """[seq, batch, vocabulary]."""
    stage = trainer.parts.stages[0]
    return stage.logits(microbatch.tokens, stage.forward_state(microbatch, step=0, training=False))[..., :61]


def test_a_conversation_sees_no_other_and_where_it_stands_is_not_seen(tmp_path):
    """Changing one changes no bit of its neighbours; and each has the logits that it has alone in a row."""
    prefix = write(tmp_path / "x", [7, 9, 6])
    packed, single = trainer_of(config(prefix, 1, data={"packing": True})), trainer_of(config(prefix, 3))
    (row,) = packed.loader.step(0)
    before = logits(packed, row)
    places = [slice(0, 6), slice(6, 14), slice(14, 19)]
    assert row.document_start[:, 0].tolist() == [0] * 6 + [6] * 8 + [14] * 5 + [19] * 5
    for place, alone in zip(places, single.loader.step(0), strict=True):
        torch.testing.assert_close(
            before[place], logits(single, alone)[: place.stop - place.start], rtol=1e-5, atol=1e-6
        )
        row.tokens[place] = row.tokens[place] % 60 + 1
        after = logits(packed, row)
        assert all(torch.equal(after[other], before[other]) == (other != place) for other in places)
        before = after
    packed.close()
    single.close()


def test_a_batch_in_which_nothing_counts_moves_nothing_to_nan(tmp_path):
    prefix = write(tmp_path / "x", [9, 12], share=0.0)
    trainer = trainer_of(config(prefix, 2, data={"validation": prefix}, optimizer={"weight_decay": 0.0}))
    before = jobs.global_tensors(trainer)
    step = trainer.step()
    assert (step.loss, step.grad_norm, step.tokens, step.skipped) == (0.0, 0.0, 0, False)
    assert trainer.evaluate() == 0.0
    assert all(torch.equal(value, before[name]) for name, value in jobs.global_tensors(trainer).items())
    trainer.close()


def test_a_resumed_run_reads_the_same_rows(ranks, tmp_path):
    """Shuffled and packed, over several epochs, on another number of ranks; and with other packing it is other data."""
    run = config(write(tmp_path / "x", LENGTHS), 4, data={"packing": True, "shuffle": True})
    straight = ranks.run(1, jobs_training.train_and_save, run, 2, 3)[0]
    resumed = {**run, "checkpoint": {"load": straight["directory"]}, "parallel": {"dp": 2}}
    got = ranks.run(2, jobs_training.resume, resumed, 3)[0]
    assert got["place"]["samples"] == 8
    assert got["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)
    other = {**run, "checkpoint": {"load": straight["directory"]}, "data": {**run["data"], "packing": False}}
    assert (
        "was trained with other samples: data.packing was true, is false"
        in ranks.run(1, jobs_training.refusal, other)[0]
    )


def test_a_small_model_learns_its_answers(tmp_path):
    """From jsonl to the model that answers: greedy tokens after the prompt are the answer and the end of the turn."""
    answers = {"one?": "uno", "two?": "dos", "six?": "seis"}
    chats = [
        [{**SHORT[0], "content": question}, {**SHORT[1], "content": answer}] for question, answer in answers.items()
    ]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats])
    sources = open_inputs([str(source)], exclude=[], file_format="auto", text_key=None, split="train")
    prepare(sources, tmp_path / "x", "byte", Chats())
    run = config(str(tmp_path / "x"), 1, data={"packing": True, "sequence_length": 128})
    run["model"] |= {"vocab_size": 257, "max_position_embeddings": 128}
    run["train"] |= {"steps": 80}
    run["optimizer"] = {"lr": 1e-2, "warmup_steps": 5, "weight_decay": 0.0}
    trainer = trainer_of(run)
    results = [trainer.step() for _ in range(80)]
    assert results[-1].loss < 0.05 and results[-1].tokens == sum(len(answer) + 1 for answer in answers.values())
    template, stage = ChatTemplate(load("byte")), trainer.parts.stages[0]
    for messages in chats:
        tokens, expected = template.prompt(messages[:1]), [*messages[1]["content"].encode(), 256]
        for _ in expected:
            read = torch.tensor(tokens).unsqueeze(1)
            row = Microbatch.of(read, read, samples=torch.zeros(1, dtype=torch.int64))
            with torch.no_grad():
                tokens.append(
                    int(
                        stage.logits(row.tokens, stage.forward_state(row, step=0, training=False))[-1, 0, :257].argmax()
                    )
                )
        assert tokens[-len(expected) :] == expected
    trainer.close()
