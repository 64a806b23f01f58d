"""Stored scores of a reference model: what `megalite score` computes, and training with it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.commands import score
from megalite.commands.train import check_run
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import build
from megalite.data.indexed import IndexedTokens
from megalite.data.sequence_scores import SequenceScores, attach_scores
from megalite.objectives.find import objective_of
from megalite.training.reference import attach_stored
from megalite.training.resume_checks import check_resume
from megalite.training.trainer import Trainer
from tests.objectives.conftest import LENGTHS, documents_of
from tests.support.jobs_objectives import score_preferences, train_and_validate
from tests.support.pool import RankContext
from tests.support.preferences import write_preferences

ALONE = RankContext(0, 1)
LAYOUTS = {"tp 2, pp 2": {"tp": 2, "pp": 2}, "cp 2, dp 2": {"cp": 2, "dp": 2}}


def stored(directory: Path, prefix: str) -> np.ndarray:
    return SequenceScores.of(directory).of_file(IndexedTokens(prefix), "scores")


@pytest.fixture(scope="module")
def expected(model, prefix) -> np.ndarray:
    """The log-probabilities of the completions by transformers, in fp64."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model).double()
    prompts, sums = [row[0] for row in LENGTHS for _ in range(2)], []
    for prompt, tokens in zip(prompts, documents_of(prefix), strict=True):
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        sums.append(sum(logits[at - 1, tokens[at]].item() for at in range(prompt, len(tokens))))
    return np.array(sums)


@pytest.fixture(scope="module")
def scores(model, prefix, tmp_path_factory) -> Path:
    """Scores of one process in fp64."""
    output = tmp_path_factory.mktemp("scores") / "x"
    score_preferences(ALONE, str(model), prefix, str(output), {})
    return output


def test_the_command_scores_as_transformers_does(expected, model, prefix, tmp_path, capsys):
    words = [f"hf:{model}", "--data", prefix, "--output", str(tmp_path / "x"), "--precision", "fp32"]
    for _ in range(2):  # the second one finds that all is done
        assert score.main(words) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'x'}: 12 completions\n"
    np.testing.assert_allclose(stored(tmp_path / "x", prefix), expected, rtol=0, atol=1e-5)
    with pytest.raises(SystemExit):
        score.main([*words[:-1], "bf16"])
    assert "has results of --precision fp32, not bf16" in capsys.readouterr().err
    tree = configuration(model, prefix, tmp_path, preference={"reference": f"scores:{tmp_path / 'x'}"})
    for precision, notes in (("bf16", 1), ("fp32", 0)):
        tree["train"]["precision"] = precision
        said = [line for line in check_run(from_dict(tree))[2] if ", in fp32: train.precision = bf16" in line]
        assert len(said) == notes, "a run says if its precision is another one"


def test_scores_have_no_other_terms_of_the_training_loss(expected, model, prefix, tmp_path):
    """Of a checkpoint whose run had them."""
    tree = configuration(model, prefix, tmp_path)
    tree["train"] |= {"objective": "cross_entropy", "z_loss": 0.01, "label_smoothing": 0.1}
    config = from_dict(tree)
    trainer = Trainer(config, make_mesh(config))
    directory = str(trainer.save())
    trainer.close()
    assert score.main([directory, "--data", prefix, "--output", str(tmp_path / "x"), "--precision", "fp32"]) == 0
    np.testing.assert_allclose(stored(tmp_path / "x", prefix), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def killed(model, prefix, tmp_path_factory) -> Path:
    """What one process has stored that was killed in its second batch."""
    output = tmp_path_factory.mktemp("killed") / "x"
    words = (ALONE, str(model), prefix, str(output), {}, 1)
    process = multiprocessing.get_context("forkserver").Process(target=score_preferences, args=words)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ConfigError, match=r"ends early: 2 of \d rows of .*: it continues where it stopped"):
        stored(output, prefix)
    return output


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_killed_command_is_continued(layout, expected, scores, killed, model, prefix, tmp_path, ranks):
    """On the same layout with equal bytes, on another one with equal scores; what is done is not done again."""
    one = stored(scores, prefix)
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-6)  # transformers rotates in fp32
    shutil.copytree(killed, output := tmp_path / "x")
    (file,) = output.glob("*.f64")
    values = np.fromfile(file)
    first = int(np.flatnonzero(~np.isnan(values))[0])
    words = (str(model), prefix, str(output))
    if layout is None:
        score_preferences(ALONE, *words, {})
        assert file.read_bytes() == (scores / file.name).read_bytes()
        return
    values[first] = -1000.0
    values.tofile(file)
    ranks.run(4, score_preferences, *words, LAYOUTS[layout])
    got = stored(output, prefix).copy()
    assert got[first] == -1000.0
    got[first] = one[first]
    np.testing.assert_allclose(got, one, rtol=0, atol=1e-9)


def configuration(model: Path, prefix: str, place: Path, **sections: Any) -> dict[str, Any]:
    from megalite.families.model_config import hf_shape

    return {
        "run": {"dir": str(place)},
        "model": hf_shape(str(model)) | {"from_hf": str(model), "init_from": f"hf:{model}"},
        "parallel": {"dp": 1} | sections.get("parallel", {}),
        "lora": sections.get("lora", {}),
        "data": {"train": {prefix: 1.0}, "validation": prefix, "sequence_length": 32, "packing": True},
        "train": {
            **{"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, "precision": "fp64", "objective": "dpo"},
        },
        "preference": {"beta": 0.3} | sections.get("preference", {}),
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        "checkpoint": {"load": "none"},
    }


def train_and_save(tree: dict[str, Any]) -> None:
    config = from_dict(tree)
    trainer = Trainer(config, make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()


def test_training_with_scores_is_training_with_the_model(scores, model, prefix, tmp_path, ranks):
    """With adapters the same as without scores; and in full the same on two layouts, with validation."""
    adapters = {"lora": {"rank": 4}}
    by_scores = {"preference": {"reference": f"scores:{scores}"}}
    plain = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **adapters), 2)
    again = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **adapters, **by_scores), 2)
    full = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **by_scores), 2)
    layout = {"parallel": {"pp": 2, "cp": 2, "dp": 2, "zero": 3}}
    several = ranks.run(8, train_and_validate, configuration(model, prefix, tmp_path, **layout, **by_scores), 2)
    assert full["losses"][0] == pytest.approx(np.log(2), abs=1e-9)  # of the start, and not of each step:
    assert abs(full["losses"][1] - np.log(2)) > 1e-2
    configs = [from_dict(configuration(model, prefix, tmp_path, **adapters, **more)) for more in ({}, by_scores)]
    assert [objective.passes for objective in map(objective_of, configs) if objective] == [1, 0]
    for expected, got in ((plain, again), (full, several[0])):
        assert (got["losses"], got["validation"]) == (
            pytest.approx(expected["losses"], rel=1e-9),
            pytest.approx(expected["validation"], rel=1e-9),
        )
        held_out = expected["held_out"]
        assert held_out.keys() == expected["metrics"][0].keys() and got["held_out"] == pytest.approx(held_out, rel=1e-9)
        assert held_out["rewards/margins"] == pytest.approx(held_out["rewards/chosen"] - held_out["rewards/rejected"])
        assert 0 < held_out["rewards/accuracies"] <= 1
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(got["tensors"][name], value, rtol=0, atol=1e-9, msg=name)


def test_rows_have_the_scores_of_their_documents(prefix, tmp_path):
    """In any blend, split, order and packing; here the score of a document is minus the sum of its tokens."""

    def sums(file: IndexedTokens) -> np.ndarray:
        return -np.array([sum(tokens) for tokens in documents_of(file.prefix)], float)

    other = write_preferences(tmp_path / "other", LENGTHS, seed=1)
    for train, validation, packing in (({prefix: 1.0}, 0.5, True), ({prefix: 0.7, other: 0.3}, None, False)):
        data = DataConfig(train=train, validation=validation, sequence_length=32, packing=packing)
        seen = 0
        for dataset in filter(None, build(data, seed=0)):
            attach_scores(dataset, sums)
            for sample in range(dataset.samples_per_epoch):
                row = dataset[sample]
                totals = [
                    -row.tokens[row.sequences.index == each].sum() for each in range(len(row.sequences.documents))
                ]
                assert row.sequences.reference.tolist() == totals
                seen += len(totals)
        assert seen >= 12


def test_a_run_may_change_to_an_objective_with_scores(scores, model, prefix, tmp_path):
    """Whose reference is where the run started, and not its model without the adapters that it has trained."""
    lora, by_scores = {"lora": {"rank": 4}}, {"preference": {"reference": f"scores:{scores}"}}
    before = configuration(model, prefix, tmp_path, **lora)
    before["train"]["objective"] = "simpo"
    state = {"config": to_dict(from_dict(before)), "fingerprint": "x"}
    changed = configuration(model, prefix, tmp_path, **lora, **by_scores)
    check_resume(from_dict(changed | {"checkpoint": {"allow": ["objective"]}}), "x", state, tmp_path)
    with pytest.raises(ConfigError, match="already trained it.*name the reference with preference.reference"):
        check_resume(from_dict(configuration(model, prefix, tmp_path, **lora)), "x", state, tmp_path)


def test_other_scores_are_rejected(scores, model, prefix, tmp_path):
    def message(changed: Path, data: str = prefix, **model_options: Any) -> str:
        tree = configuration(model, data, tmp_path, preference={"reference": f"scores:{changed}"})
        tree["model"] |= model_options
        config = from_dict(tree)
        with pytest.raises(ConfigError) as error:
            attach_stored(config, *build(config.data, 0))
        return str(error.value)

    other = write_preferences(tmp_path / "other", LENGTHS, seed=1)
    assert f"has no scores of {other}, as it is now: it has those of {prefix}" in message(scores, other)
    assert "training starts from random weights" in message(scores, init_from=None)
    assert "but model.rope_theta was 10000.0, is 500000.0. Set it as it was" in message(scores, rope_theta=5e5)
    theirs = tmp_path / "theirs"
    shutil.copytree(scores, theirs)
    record = json.loads((theirs / "scores.json").read_text())
    (theirs / "scores.json").write_text(json.dumps(record | {"weights": "0"}))
    assert f"of hf:{model}, which has changed since it was scored" in message(theirs)
    (theirs / "scores.json").write_text(json.dumps(record | {"weights": "0", "model": "hf:other"}))
    assert "of hf:other, whose weights differ from those of model.init_from" in message(theirs)
    (theirs / "scores.json").write_text(json.dumps(record))
    (file,) = theirs.glob("*.f64")
    values = np.fromfile(file)
    for index, value in ((3, np.nan), (4, 0.5), (5, -np.inf)):
        changed = values.copy()
        changed[index] = value
        changed.tofile(file)
        assert f"is damaged: document {index} of {prefix} has the score {value}" in message(theirs)
    values[:-1].tofile(file)
    assert "has 88 bytes where 12 documents have 96. Run `megalite score`" in message(theirs)
    file.unlink()
    assert "has 0 bytes where" in message(theirs) and not file.exists()
    for left in (None, values[:-1]):  # what is missing or truncated is scored again
        if left is not None:
            left.tofile(file)
        score_preferences(ALONE, str(model), prefix, str(theirs), {})
        assert file.read_bytes() == (scores / file.name).read_bytes()
    (theirs / "scores.json").write_text("{")
    assert "is not a record of log-probabilities" in message(theirs)
    assert f"preference.reference = scores:{tmp_path}/none: there is no directory" in message(tmp_path / "none")
    (theirs / "scores.json").rename(theirs / "words.json")
    assert "has the words of a teacher, not log-probabilities of completions" in message(theirs)
    assert "cannot be compared with those of model.init_from" in message(scores, init_from=f"hf:{tmp_path}")


def test_options_without_an_effect_on_scores_may_differ(scores, model, prefix, tmp_path):
    tree = configuration(model, prefix, tmp_path, preference={"reference": f"scores:{scores}"})
    tree["model"] |= {"max_position_embeddings": 64, "residual_dropout": 0.1, "initializer_range": 0.5, "head_dim": 8}
    config = from_dict(tree)
    attach_stored(config, *build(config.data, 0))


def test_other_scores_are_not_taken_for_those_of_before(scores, model, prefix, tmp_path):
    """The directory of a run that resumes has scores of another model."""
    theirs = tmp_path / "theirs"
    shutil.copytree(scores, theirs)
    options = {"reference": f"scores:{theirs}", "allow_reference_change": True}
    tree = configuration(model, prefix, tmp_path, preference=options) | {"checkpoint": {"load": "auto"}}
    train_and_save(tree)
    train_and_save(tree)  # it resumes
    record = theirs / "scores.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"weights": "0"}))
    with pytest.raises(ConfigError, match=f"it was scores of hf:{model}, with other weights.* score the data"):
        train_and_save(tree)


def test_options_of_a_teacher_are_rejected_without_one(model, prefix, tmp_path, capsys):
    with pytest.raises(SystemExit):
        score.main([f"hf:{model}", "--data", prefix, "--output", str(tmp_path / "x"), "--packing"])
    assert "--packing has no effect without --top_k" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        score.main([f"hf:{model}", "--data", prefix, "--output", str(tmp_path / "x"), "--top_k", "4"])
    assert "--top_k requires --sequence_length" in capsys.readouterr().err
    assert "longest pair); required with --top_k" in " ".join(score.parser().format_help().split())


def test_the_command_rejects_what_it_cannot_score(scores, model, prefix, tmp_path, capsys):
    def message(*words: str, source: Path = model, data: str = prefix, output: Path = tmp_path / "none") -> str:
        with pytest.raises(SystemExit) as end:
            score.main([f"hf:{source}", "--data", data, "--output", str(output), "--precision", "fp32", *words])
        assert end.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        return lines[-1]

    assert "is not empty and has no scores" in message(output=tmp_path.parent)
    assert "--sequence_length 8 cuts a pair. Set it to" in message("--sequence_length", "8")
    tokenized = write_preferences(tmp_path / "bytes", LENGTHS)
    record = json.loads(Path(f"{tokenized}.json").read_text())
    Path(f"{tokenized}.json").write_text(json.dumps(record | {"tokenizer": "byte"}))
    assert "uses a different tokenizer than" in message(data=tokenized)
    assert not (tmp_path / "none").exists()
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(1e30)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert "whose weights differ from those of" in message(source=broken, output=scores)
    shutil.copytree(model, other := tmp_path / "another base")
    shape = json.loads((other / "config.json").read_text())
    shape["rope_parameters"]["rope_theta"] = 5e5
    (other / "config.json").write_text(json.dumps(shape))
    said = message(source=other, output=scores)
    assert "with the same weights, but model.rope_theta was 10000.0, is 500000.0. Choose" in said
    weights["lm_head.weight"].mul_(1e30)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert "has the log-probability nan with --precision fp32" in message(source=broken)
