"""Distillation: the divergence of a split vocabulary is that of whole logits, and every layout trains like one
process."""

from __future__ import annotations

import errno
import json
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megalite.assembly import parts as build
from megalite.commands import convert as convert_hf
from megalite.commands import score
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.data.dataset import build as open_data
from megalite.data.preparation.writer import IndexedWriter
from megalite.data.teacher_words import TeacherWords
from megalite.families.model_config import hf_shape
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.top_words import TopWords
from megalite.planner.memory.estimate import estimate
from megalite.planner.time.traffic import traffic
from megalite.training import meta_device as meta
from megalite.training import teacher
from megalite.training.reference import attach_stored
from megalite.training.trainer import Trainer
from tests.planner.test_memory import Sent
from tests.support import jobs_distillation, jobs_memory
from tests.support.configs import EOS, schedule_options, write_tokens
from tests.support.jobs_objectives import train_and_validate
from tests.support.pool import RankContext

STEPS, S, VOCAB = 3, 16, 101
LR, EPS = 2e-2, 1e-1
KINDS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward", "temperature": 2.0},
    "reverse": {"kind": "reverse", "cross_entropy_weight": 0.5},
    "jsd": {"kind": "jsd", "beta": 0.3, "temperature": 0.7, "cross_entropy_weight": 2.0},
}


def expected_losses(student: Tensor, teacher: Tensor, options: dict[str, Any]) -> Tensor:
    """TRL's divergence of each token, on whole logits."""
    from trl.experimental.gkd import GKDTrainer

    beta = {"forward": 0.0, "reverse": 1.0}.get(options["kind"], options.get("beta"))
    temperature = options.get("temperature", 1.0)
    return torch.stack(
        [
            GKDTrainer.generalized_jsd_loss(one[None], other[None], beta=beta, temperature=temperature, reduction="sum")
            for one, other in zip(student, teacher, strict=True)
        ]
    )


@pytest.mark.parametrize("tp, name", [(1, "forward"), (2, "jsd"), (4, "forward"), (4, "reverse"), (4, "jsd")])
def test_divergence_of_a_split_vocabulary_is_that_of_whole_logits(tp, name, ranks):
    """13 words and padding to 20: at tp 4 one rank has padding alone."""
    options, generator = KINDS[name], torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(9, 13, dtype=torch.float64, generator=generator) for _ in range(2))
    targets, weights = torch.randint(13, (9,), generator=generator), torch.rand(9, generator=generator).double()
    targets[2] = IGNORE_INDEX
    weights[2] = 0
    leaf = student.clone().requires_grad_()
    losses = torch.where(targets == IGNORE_INDEX, 0, expected_losses(leaf, teacher, options))
    entropy = F.cross_entropy(leaf, targets, label_smoothing=0.1, reduction="none")
    entropy = entropy + torch.where(targets == IGNORE_INDEX, 0, 1e-3 * leaf.logsumexp(-1) ** 2)
    loss = 0.125 * (weights * (losses + options.get("cross_entropy_weight", 0.0) * entropy)).sum()
    loss.backward()
    assert leaf.grad is not None
    gradient = F.pad(leaf.grad, (0, 20 - 13))
    got = ranks.run(tp, jobs_distillation.divergence, student, teacher, targets, weights, 20, options)
    for rank, (value, own) in enumerate(got):
        assert value.item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(own, gradient.chunk(tp, dim=1)[rank], rtol=0, atol=1e-12)


def expected_of_top_words(student: Tensor, teacher: Tensor, number: int, temperature: float) -> Tensor:
    """The divergence of each token where all words but the teacher's top ones are a single outcome."""
    log_p, log_q = ((each / temperature).log_softmax(1) for each in (teacher, student))
    values, words = log_p.topk(number)
    losses = (values.exp() * (values - log_q.gather(1, words))).sum(1)
    if number < log_p.shape[1]:
        others = torch.ones_like(log_p, dtype=torch.bool).scatter(1, words, False)
        rest, own = ((each.exp() * others).sum(1) for each in (log_p, log_q))
        losses = losses + rest * (rest.log() - own.log())
    return losses


@pytest.mark.parametrize("tp, number", [(1, 4), (2, 1), (4, 4), (4, 13)])
def test_divergence_from_top_words_of_a_split_vocabulary(tp, number, ranks):
    """With all 13 words it is the forward divergence."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(9, 13, dtype=torch.float64, generator=generator) for _ in range(2))
    student[0, :5] += 40  # outside, the student's probability is below the resolution of 1
    targets, weights = torch.randint(13, (9,), generator=generator), torch.rand(9, generator=generator).double()
    targets[2] = IGNORE_INDEX
    options = {"temperature": 2.0, "top": number, "cross_entropy_weight": 0.5}
    leaf = student.clone().requires_grad_()
    of_tokens = expected_of_top_words(leaf, teacher, number, 2.0)
    losses = torch.where(targets == IGNORE_INDEX, 0, of_tokens)
    entropy = F.cross_entropy(leaf, targets, label_smoothing=0.1, reduction="none")
    entropy = entropy + torch.where(targets == IGNORE_INDEX, 0, 1e-3 * leaf.logsumexp(-1) ** 2)
    loss = 0.125 * (weights * (losses + 0.5 * entropy)).sum()
    loss.backward()
    assert leaf.grad is not None
    gradient = F.pad(leaf.grad, (0, 20 - 13))
    got = ranks.run(tp, jobs_distillation.divergence, student, teacher, targets, weights, 20, options)
    for rank, (value, own) in enumerate(got):
        assert value.item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(own, gradient.chunk(tp, dim=1)[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_student_that_is_sure_of_a_word_has_a_gradient(tp, ranks):
    """Where its probability of all other words together is too small for fp32, against the same in fp64."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(9, 13, dtype=torch.float64, generator=generator) for _ in range(2))
    student[:, 0] += 30
    teacher /= 10
    teacher[:, 0] += 1
    weights, options = torch.ones(9, dtype=torch.float64), {"temperature": 0.1, "top": 4}
    words = (teacher / 0.1).topk(4).indices
    rest = (student / 0.1).log_softmax(1).scatter(1, words, -torch.inf).logsumexp(1)
    assert rest.max() < -110
    targets, logits = torch.zeros(9, dtype=torch.long), (student, teacher)
    exact = ranks.run(tp, jobs_distillation.divergence, *logits, targets, weights, 20, options)
    single = [each.float() for each in logits]
    got = ranks.run(tp, jobs_distillation.divergence, *single, targets, weights.float(), 20, options)
    for (value, own), (expected, gradient) in zip(got, exact, strict=True):
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(own.double(), gradient, rtol=1e-4, atol=1e-6)


# ---- a run with a teacher


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Hugging Face directories of a student, and of a teacher with other widths and depth and a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory, places = tmp_path_factory.mktemp("models"), []
    shapes = {
        "student": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        "teacher": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True},
    }
    torch.manual_seed(0)
    for name, shape in shapes.items():
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = LlamaConfig(
            **shape, **heads, vocab_size=VOCAB, max_position_embeddings=S, initializer_range=0.2, eos_token_id=EOS
        )
        LlamaForCausalLM(sizes).save_pretrained(directory / name)
        places.append(str(directory / name))
    return places[0], places[1]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), VOCAB, 600)


def configuration(prefix: str, models: tuple[str, str], kind: str, micro: int = 4, **options: Any) -> dict[str, Any]:
    student, teacher = models
    axes = {name: options[name] for name in ("tp", "pp", "dp", "cp", "zero", "context") if name in options}
    schedule, virtual_stages = schedule_options(options.get("schedule", "1f1b"))
    own = {("divergence" if name == "kind" else name): value for name, value in KINDS[kind].items()}
    return {
        "run": {"dir": prefix + "_runs", "name": options.get("name", "run")},
        "model": hf_shape(student) | {"from_hf": student, "init_from": f"hf:{student}"},
        "parallel": {
            **{"dp": 1, "sequence_parallel": options.get("sequence_parallel", False), "bucket_mb": 0.02},
            **{"schedule": schedule, "virtual_stages": virtual_stages},
            **axes,
        },
        "data": {
            **{"train": prefix, "validation": 0.3, "sequence_length": S, "shuffle": False},
            "eod_mask_loss": True,  # so that ranks have unequal numbers of targets
        },
        "train": {
            **{"steps": STEPS, "global_batch_size": 4, "micro_batch_size": micro, "grad_clip": 0.0},
            **{"objective": "distillation", "loss_chunk": options.get("chunk", 0)},
            "precision": options.get("precision", "fp64"),
        },
        "distillation": {"teacher": options.get("teacher", f"hf:{teacher}"), **own},
        "optimizer": {
            **{"lr": LR, "eps": EPS, "weight_decay": 0.0, "warmup_steps": 0, "betas": [0.9, 0.999]},
            "decay": "constant",
        },
        "checkpoint": {"load": "none"},
        "validation": {"batches": 2},
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_transformers_models(name, models, prefix, tmp_path):
    """From the same weights to the same weights, in fp32. AdamW's first update is lr · g / (|g| + eps): with a large
    eps it is as exact as the gradient."""
    from transformers import AutoModelForCausalLM

    config = from_dict(configuration(prefix, models, name, micro=2, precision="fp32", name=name))
    trainer = Trainer(config, build.make_mesh(config))
    result = trainer.step()
    assert convert_hf.main(["export", str(trainer.save()), str(tmp_path / "after")]) == 0
    rows = [trainer.train_data[row] for row in range(4)]
    tokens, targets = (
        torch.stack([torch.from_numpy(getattr(row, name)) for row in rows]) for name in ("tokens", "targets")
    )
    trainer.close()

    student, large = (AutoModelForCausalLM.from_pretrained(place) for place in models)
    options = KINDS[name]
    with torch.no_grad():
        of_teacher = large(tokens).logits.flatten(0, 1)
    logits = student(tokens).logits.flatten(0, 1)
    counted = tokens.flatten() != EOS  # as eod_mask_loss
    losses = expected_losses(logits, of_teacher, options)
    losses = losses + options.get("cross_entropy_weight", 0.0) * F.cross_entropy(
        logits, targets.flatten(), reduction="none"
    )
    loss = losses[counted].mean()
    loss.backward()
    torch.optim.AdamW(student.parameters(), lr=LR, eps=EPS, weight_decay=0.0, betas=(0.9, 0.999)).step()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    trained = load_file(tmp_path / "after" / "model.safetensors")
    for key, value in student.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=0, atol=1e-6, msg=key)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence, chunks": {"kind": "jsd", "tp": 2, "sequence_parallel": True, "micro": 2, "chunk": 14},
    "pp 2": {"kind": "reverse", "pp": 2, "micro": 1},
    "pp 2, zb-h2, steps that do not wait": {"kind": "jsd", "pp": 2, "schedule": "zb-h2", "micro": 1},
    "dp 2, zero 3, chunks": {"kind": "reverse", "dp": 2, "zero": 3, "micro": 2, "chunk": 10},
    "cp 2, ring": {"kind": "forward", "cp": 2, "context": "ring", "micro": 2},
    "tp 2, pp 2, dp 2, zero 3": {"kind": "forward", "tp": 2, "pp": 2, "dp": 2, "zero": 3, "micro": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix, models):
    """fp64, within 1e-9: losses, gradient norms, validation losses and weights."""
    options = LAYOUTS[name]
    expected = references.run(train_and_validate, configuration(prefix, models, options["kind"]), STEPS)
    world = prod(options.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    got = ranks.run(world, train_and_validate, configuration(prefix, models, **options), STEPS)
    for rank in got:
        for key in ("losses", "grad_norms", "validation"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-9), key
    for tensor, value in expected["tensors"].items():
        torch.testing.assert_close(got[0]["tensors"][tensor], value, rtol=0, atol=1e-9, msg=tensor)
    assert expected["losses"][0] != pytest.approx(expected["losses"][-1], rel=1e-4), "it trains"


def test_a_run_is_a_teacher(models, prefix):
    """A model has no divergence from its own checkpoint, which is named by its run."""
    config = from_dict(configuration(prefix, models, "forward", name="taught"))
    trainer = Trainer(config, build.make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()
    own = str(config.run.directory)
    again = configuration(prefix, models, "forward", teacher=own, name="again")
    config = from_dict(again | {"model": again["model"] | {"init_from": own}})
    assert teacher.check(config, 1) == []
    trainer = Trainer(config, build.make_mesh(config))
    result = trainer.step()
    trainer.close()
    assert abs(result.loss) < 1e-12 and result.grad_norm < 1e-12


# ---- a teacher's words, stored before the run


@pytest.fixture(scope="module")
def words(prefix, models, tmp_path_factory):
    """Directories of the 4 most probable words at temperature 1, and of all 101 at temperature 2; of one process."""
    directory, context = tmp_path_factory.mktemp("words"), RankContext(0, 1)
    for name, number, temperature in (("some", 4, 1.0), ("all", VOCAB, 2.0)):
        jobs_distillation.score_words(context, models[1], prefix, str(directory / name), {}, number, temperature, S)
    return directory


def stored(directory: Path) -> list[Any]:
    """Words, log-probabilities and the rest of every row, training rows first."""
    store = TeacherWords.of(directory)
    return [np.concatenate(each) for each in zip(*(store.arrays(rows, "r") for rows in store.sets), strict=True)]


def test_stored_words_are_those_of_transformers(words, models, prefix):
    from transformers import AutoModelForCausalLM

    config = from_dict(configuration(prefix, models, "forward"))
    train, validation = open_data(config.data, config.run.seed)
    assert validation is not None
    rows = [data[row] for data in (train, validation) for row in range(data.samples_per_epoch)]
    tokens = torch.stack([torch.from_numpy(row.tokens) for row in rows])
    with torch.no_grad():
        log_p = AutoModelForCausalLM.from_pretrained(models[1]).double()(tokens).logits.log_softmax(-1)
    values, names = log_p.topk(4)
    own, probabilities, rest = stored(words / "some")
    assert (torch.from_numpy(own.astype(np.int64)) == names).float().mean() > 0.999  # transformers rotates in fp32
    np.testing.assert_allclose(probabilities, values.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(rest, 1 - values.exp().sum(-1).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_words_are_stored_on_any_layout(layout, words, models, prefix, ranks, tmp_path):
    """An interrupted command is continued; what is not done is not taken for words."""
    output = str(tmp_path / "x")
    jobs_distillation.score_words(RankContext(0, 1), models[1], prefix, output, {}, 4, 1.0, S, batches=1)
    config = from_dict(configuration(prefix, models, "forward", teacher=f"scores:{output}"))
    config.distillation.temperature = 1.0
    with pytest.raises(ConfigError, match=r"ends early: 4 of \d+ rows of .*: it continues where it stopped"):
        attach_stored(config, *open_data(config.data, config.run.seed))
    ranks.run(4, jobs_distillation.score_words, models[1], prefix, output, layout, 4, 1.0, S)
    for own, expected in zip(stored(tmp_path / "x"), stored(words / "some"), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6 if own.dtype == np.float32 else 1e-12)


STORED_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence, chunks": {"tp": 2, "sequence_parallel": True, "micro": 2, "chunk": 14},
    "tp 2, pp 2, zb-h2": {"tp": 2, "pp": 2, "schedule": "zb-h2", "micro": 1},
    "dp 2, cp 2, zero 3, ring": {"dp": 2, "cp": 2, "context": "ring", "zero": 3, "micro": 2},
}


def from_words(words: Path, name: str, prefix: str, models: tuple[str, str], **options: Any) -> dict[str, Any]:
    tree = configuration(prefix, models, "forward", teacher=f"scores:{words / name}", **options)
    temperature = 1.0 if name == "some" else 2.0
    tree["distillation"] |= {"temperature": temperature, "cross_entropy_weight": 0.5 if name == "some" else 0.0}
    return tree | {"data": tree["data"] | {"shuffle": True}}


@pytest.mark.parametrize("name", STORED_LAYOUTS)
def test_stored_words_train_like_one_process(name, words, prefix, models, ranks, references):
    options = STORED_LAYOUTS[name]
    expected = references.run(train_and_validate, from_words(words, "some", prefix, models), STEPS)
    world = prod(options.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    got = ranks.run(world, train_and_validate, from_words(words, "some", prefix, models, **options), STEPS)
    for rank in got:
        for key in ("losses", "grad_norms", "validation"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-9), key
    for tensor, value in expected["tensors"].items():
        torch.testing.assert_close(got[0]["tensors"][tensor], value, rtol=0, atol=1e-9, msg=tensor)
    assert expected["losses"][0] != pytest.approx(expected["losses"][-1], rel=1e-4), "it trains"


def test_all_words_train_as_the_teacher_itself(words, prefix, models, references):
    """Within what fp32 keeps of a log-probability."""
    shuffled = configuration(prefix, models, "forward")
    shuffled["data"] |= {"shuffle": True}
    online = references.run(train_and_validate, shuffled, STEPS)
    from_file = references.run(train_and_validate, from_words(words, "all", prefix, models), STEPS)
    for key in ("losses", "grad_norms", "validation"):
        assert from_file[key] == pytest.approx(online[key], rel=1e-6), key
    for tensor, value in online["tensors"].items():
        torch.testing.assert_close(from_file["tensors"][tensor], value, rtol=0, atol=1e-7, msg=tensor)


def test_other_words_are_rejected(words, prefix, models, tmp_path):
    def message(directory: Path, **sections: dict[str, Any]) -> str:
        tree = from_words(directory.parent, directory.name, prefix, models)
        tree["distillation"]["temperature"] = 1.0
        for section, values in sections.items():
            tree[section] = tree[section] | values
        config = from_dict(tree)
        with pytest.raises(ConfigError) as error:
            attach_stored(config, *open_data(config.data, config.run.seed))
        return str(error.value)

    some = tmp_path / "some"
    shutil.copytree(words / "some", some)
    assert "has no words for the rows of" in message(some, data={"sequence_length": 8})
    other = message(some, data={"validation": 0.2})
    assert "0.2 held out): it has those of" in other and "--top_k 4" in other and "--held_out 0.2 " in other
    assert "with data.reset_positions = False" in message(some, data={"reset_positions": True})
    assert "at the temperature 1, but distillation.temperature = 2" in message(some, distillation={"temperature": 2.0})
    assert "vocabulary has 101 tokens, but model.vocab_size = 103" in message(some, model={"vocab_size": 103})
    for file in some.glob("*.log_p"):
        np.zeros(file.stat().st_size // 4, np.float32).tofile(file)
    assert "is damaged: row 0 of" in message(some) and "has no probabilities" in message(some)
    for file in some.glob("*.rest"):
        file.unlink()
    assert "are missing or truncated" in message(some)
    (some / "words.json").write_text("{}")
    assert "is not a record of the words" in message(some)
    assert f"distillation.teacher = scores:{tmp_path}/none: there is no directory" in message(tmp_path / "none")
    (some / "words.json").rename(some / "scores.json")
    assert "has log-probabilities of completions, not the words of a teacher" in message(some)
    shutil.copytree(models[1], tmp_path / "model")
    assert f"Use hf:{tmp_path}/model" in message(tmp_path / "model")


def test_words_of_another_number_are_not_mixed(words, models, prefix, tmp_path, capsys):
    options = ["--data", prefix, "--output", str(words / "some"), "--sequence_length", str(S), "--precision", "fp32"]
    with pytest.raises(SystemExit):
        score.main([f"hf:{models[1]}", *options, "--top_k", "8"])
    assert "with --top_k 4, not 8" in capsys.readouterr().err


def test_other_words_are_not_taken_for_those_of_before(words, prefix, models, tmp_path):
    """The directory of a run that resumes has the words of another teacher."""
    theirs = tmp_path / "some"
    shutil.copytree(words / "some", theirs)
    tree = from_words(tmp_path, "some", prefix, models) | {
        "run": {"dir": str(tmp_path)},
        "checkpoint": {},
    }
    config = from_dict(tree)
    trainer = Trainer(config, build.make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()
    Trainer(config, build.make_mesh(config)).close()  # it resumes
    record = theirs / "words.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"model": "hf:other", "weights": "0"}))
    with pytest.raises(ConfigError, match=r"of hf:.*teacher, and is the 4 most probable words of hf:other\. To go on"):
        Trainer(config, build.make_mesh(config))


@pytest.mark.parametrize(
    "options, said",
    [
        (["--top_k", "102"], "--top_k 102 is more than the 101 words"),
        (["--sequence_length", "17"], "is more than the 16 positions"),
        (["--temperature", "0"], "--temperature must be positive"),
        (["--cp", "2"], "--cp 2 is not supported with --top_k"),
        (["--held_out", "1.5"], "--held_out must be a fraction"),
    ],
)
def test_bad_options_of_the_command(options, said, models, prefix, tmp_path, capsys):
    words = [f"hf:{models[1]}", "--data", prefix, "--output", str(tmp_path / "x"), "--sequence_length", "16"]
    with pytest.raises(SystemExit):
        score.main([*words, "--top_k", "4", *options])
    assert said in capsys.readouterr().err


def write_chats(prefix: Path, lengths: list[int], seed: int = 0) -> str:
    """Random conversations with EOS in the middle and at the end; returns PREFIX."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, VOCAB, masked=True) as writer:
        for length in lengths:
            tokens = random.integers(1, VOCAB, length)
            tokens[[length // 2, -1]] = EOS
            writer.add(tokens, [length], np.repeat(np.uint8([0, 1]), [2, length - 2]))
        writer.finish({"vocab_size": VOCAB, "eos": EOS, "chat": {}})
    return str(prefix)


def test_positions_of_conversations_are_not_reset(models, tmp_path, capsys):
    """The command rejects it as a run does, with the words of data.reset_positions."""
    chats = write_chats(tmp_path / "chats", [9, 12])
    options = ["--output", str(tmp_path / "x"), "--sequence_length", str(S), "--top_k", "4", "--reset_positions"]
    with pytest.raises(SystemExit):
        score.main([f"hf:{models[1]}", "--data", chats, *options])
    said = capsys.readouterr().err
    assert f"--data {chats} has no such rows: data.reset_positions = true requires text" in said


def test_the_command_stores_words(words, models, prefix, tmp_path, capsys):
    options = ["--sequence_length", str(S), "--held_out", "0.3", "--precision", "fp32", "--top_k", "4"]
    assert score.main([f"hf:{models[1]}", "--data", prefix, "--output", str(tmp_path / "x"), *options]) == 0
    own, expected = stored(tmp_path / "x"), stored(words / "some")
    assert capsys.readouterr().out == f"{tmp_path / 'x'}: {len(own[0])} rows\n"
    np.testing.assert_allclose(own[1], expected[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("packing", [True, False])
def test_a_blend_with_a_held_out_fraction(packing, models, tmp_path):
    """Its validation data is what is held out of all files, in their order."""
    lengths = {"a": [9, 12, 10, 8, 14, 11, 9, 13], "b": [8, 9, 10, 11, 12, 13]}
    one, two = (write_chats(tmp_path / name, own, seed) for seed, (name, own) in enumerate(lengths.items()))
    output = tmp_path / "x"
    options = ["--sequence_length", str(S), "--held_out", "0.3", "--top_k", "4"] + ["--packing"] * packing
    assert score.main([f"hf:{models[1]}", "--data", one, two, "--output", str(output), *options]) == 0
    tree = configuration(one, models, "forward", teacher=f"scores:{output}")
    tree["distillation"]["temperature"] = 1.0
    tree["data"] = {"sequence_length": S, "packing": packing, "validation": 0.3, "train": {one: 0.7, two: 0.3}}
    config = from_dict(tree)
    train, validation = open_data(config.data, config.run.seed)
    attach_stored(config, train, validation)
    assert train.has_top and validation is not None and validation.has_top
    config.data.train = {two: 0.3, one: 0.7}
    with pytest.raises(ConfigError, match=f"the rows of {two}, {one} .*--data {two} {one} "):
        attach_stored(config, *open_data(config.data, config.run.seed))


def test_words_are_not_replaced_by_those_of_other_positions(models, prefix, tmp_path, capsys):
    command = [f"hf:{models[1]}", "--data", prefix, "--output", str(output := tmp_path / "x")]
    command += ["--sequence_length", str(S), "--held_out", "0.3", "--precision", "fp32", "--top_k", "4"]
    score.main(command)
    before = {file: file.read_bytes() for file in output.iterdir()}
    with pytest.raises(SystemExit):
        score.main([*command, "--reset_positions"])
    said = capsys.readouterr().err
    assert f"--output {output} has words of {prefix} with --reset_positions = false, and they would be" in said
    assert "Leave out --reset_positions, or choose another directory" in said
    assert {file: file.read_bytes() for file in output.iterdir()} == before


@pytest.mark.parametrize("files", [2, 0])
def test_without_room_for_words_nothing_is_stored(files, models, prefix, tmp_path, monkeypatch, capsys):
    """The disk is full after some of the files."""
    reserve, left = os.posix_fallocate, iter(range(files))

    def full(*arguments: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    output, options = tmp_path / "x", ["--sequence_length", str(S), "--precision", "fp32", "--top_k", "4"]
    with pytest.raises(SystemExit):
        score.main([f"hf:{models[1]}", "--data", prefix, "--output", str(output), *options])
    said = capsys.readouterr().err
    assert f"{output} has no room for the words of {prefix}, which take 23,680 bytes:" in said
    assert list(output.iterdir()) == []


def test_words_are_stored_where_room_cannot_be_reserved(words, models, prefix, tmp_path, monkeypatch):
    def unsupported(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    output = str(tmp_path / "x")
    jobs_distillation.score_words(RankContext(0, 1), models[1], prefix, output, {}, 4, 1.0, S)
    for own, expected in zip(stored(tmp_path / "x"), stored(words / "some"), strict=True):
        np.testing.assert_array_equal(own, expected)


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no directory": ({"distillation": {"teacher": "hf:nowhere"}}, 1, "nowhere"),
    "no checkpoint": ({"distillation": {"teacher": "nowhere"}}, 1, "nowhere"),
    "vocabulary": ({"model": {"vocab_size": 100}}, 1, "vocabulary of 101 tokens, but model.vocab_size = 100"),
    "positions": ({"data": {"sequence_length": 17}}, 1, "up to 16 positions, but data.sequence_length = 17"),
    "layout": ({"parallel": {"pp": 4}}, 4, "does not fit this run: parallel.pp = 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_teacher_that_does_not_fit_is_rejected(name, models, prefix):
    changes, world, says = BAD[name]
    tree = configuration(prefix, models, "forward")
    for section, values in changes.items():
        tree[section] = tree[section] | values
    with pytest.raises(ConfigError, match="distillation.teacher") as error:
        teacher.check(from_dict(tree), world)
    assert says in str(error.value)


def test_a_teacher_with_another_tokenizer_is_rejected(models, prefix, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    own = tmp_path / "teacher"
    shutil.copytree(models[1], own)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(own)
    named = str(tmp_path / "tokens")
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, named + ending)
    about = {"vocab_size": VOCAB, "eos": EOS, "tokenizer": "byte"}
    Path(named + ".json").write_text(json.dumps(about))
    config = from_dict(configuration(named, models, "forward", teacher=f"hf:{own}"))
    with pytest.raises(ConfigError, match="uses a different tokenizer than distillation.teacher"):
        teacher.check(config, 1)


@pytest.mark.parametrize("name", ["tp 2, split sequence, chunks", "dp 2, zero 3, chunks", "pp 2"])
def test_traffic_is_what_a_step_sends(name, models, prefix, monkeypatch):
    """Of rank 0, which has the head but for pp 2."""
    tree = configuration(prefix, models, **LAYOUTS[name])
    config = from_dict(tree)
    world = build.layout(config).world
    with meta.fake_process(0, world), Sent() as sent:
        mesh = build.make_mesh(config)
        monkeypatch.setattr(jobs_memory, "mesh_of", lambda context, config: mesh)
        stepping = jobs_memory.Stepping(None, tree)
        own = teacher.Teacher(config, stepping.parts, mesh, torch.device("cpu"))
        sent.bytes = 0.0  # the initial weights were gathered
        own.run(stepping.batches)
        stepping.step(1)
    planned = traffic(config, world)[0]
    assert sum(planned.to_dict().values()) == pytest.approx(sent.bytes, rel=1e-9)


def of_stored_words(prefix: str, models: tuple[str, str], place: Path, number: int, **options: Any) -> dict[str, Any]:
    """A run whose teacher has `number` stored words of 1,001."""
    TeacherWords(place, "hf:x", "x", number, 1.0, 1001).save()
    tree = configuration(prefix, models, "forward", teacher=f"scores:{place}", **options)
    tree["model"] |= {"vocab_size": 1001}
    tree["distillation"] |= {"temperature": 1.0}
    return tree


def stepping_with_words(config: Config, tree: dict[str, Any], number: int) -> jobs_memory.Stepping:
    stepping = jobs_memory.Stepping(RankContext(0, 1), tree)
    teacher.use_stored_words(stepping.parts, config)
    for batch in stepping.batches:
        words = torch.rand(*batch.tokens.shape, 1001).topk(number).indices.int()
        batch.top = TopWords(words, torch.full(words.shape, -7.0), torch.full(batch.tokens.shape, 0.5).double())
    return stepping


@pytest.mark.parametrize("number", [1, 256])
@pytest.mark.parametrize("chunk", [0, 16])
def test_memory_of_stored_words_is_what_the_allocator_gives(chunk, number, models, prefix, tmp_path):
    """With temporaries, which are estimates; without the words and the tables of the loss it is less than a half."""
    tree = of_stored_words(prefix, models, tmp_path, number, chunk=chunk, precision="fp32")
    config = from_dict(tree)
    (planned,) = estimate(config, 1, "cpu")
    stepping = stepping_with_words(config, tree, number)
    kept = sum(each.nbytes for batch in stepping.batches for each in batch.top or ())
    allocated = kept + jobs_memory.allocated_by(stepping)
    assert planned.total - planned.states.device == pytest.approx(allocated, rel=0.1)


@pytest.mark.parametrize("name", STORED_LAYOUTS)
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_traffic_of_stored_words_is_what_a_step_sends(weight, name, models, prefix, monkeypatch, tmp_path):
    tree = of_stored_words(prefix, models, tmp_path, 4, **STORED_LAYOUTS[name])
    tree["distillation"] |= {"cross_entropy_weight": weight}
    config = from_dict(tree)
    world = build.layout(config).world
    with meta.fake_process(0, world), Sent() as sent:
        mesh = build.make_mesh(config)
        monkeypatch.setattr(jobs_memory, "mesh_of", lambda context, config: mesh)
        stepping = stepping_with_words(config, tree, 4)
        sent.bytes = 0.0  # the initial weights were gathered
        stepping.step(1)
    planned = traffic(config, world)[0]
    assert sum(planned.to_dict().values()) == pytest.approx(sent.bytes, rel=1e-9)
