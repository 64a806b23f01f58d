"""Stored scores of a reference model: what `megalite score` computes, and training with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.commands import score
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.data.dataset import build
from megalite.data.indexed import IndexedTokens
from megalite.data.sequence_scores import SequenceScores
from megalite.training.reference import attach_reference
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_continue_each_other(layout, expected, scores, model, prefix, tmp_path, ranks):
    """An interrupted command is continued on another layout; what is not done is not taken for scores."""
    one = stored(scores, prefix)
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-6)  # transformers rotates in fp32
    output = tmp_path / "x"
    score_preferences(ALONE, str(model), prefix, str(output), {}, batches=1)
    with pytest.raises(ConfigError, match=r"ends early: 2 of \d rows of .*: it continues where it stopped"):
        stored(output, prefix)
    ranks.run(4, score_preferences, str(model), prefix, str(output), LAYOUTS[layout])
    np.testing.assert_allclose(stored(output, prefix), one, rtol=0, atol=1e-9)


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


def test_training_with_scores_is_training_with_the_model(scores, model, prefix, tmp_path, ranks):
    """With adapters the same as without scores; and in full the same on two layouts, with validation."""
    adapters = {"lora": {"rank": 4}}
    by_scores = {"preference": {"reference": f"scores:{scores}"}}
    plain = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **adapters), 2)
    again = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **adapters, **by_scores), 2)
    full = train_and_validate(ALONE, configuration(model, prefix, tmp_path, **by_scores), 2)
    layout = {"parallel": {"pp": 2, "dp": 2, "zero": 3}}
    several = ranks.run(4, train_and_validate, configuration(model, prefix, tmp_path, **layout, **by_scores), 2)
    assert full["losses"][0] == pytest.approx(np.log(2), abs=1e-9) and full["losses"][1] != plain["losses"][1]
    for expected, got in ((plain, again), (full, several[0])):
        assert (got["losses"], got["validation"]) == (
            pytest.approx(expected["losses"], rel=1e-9),
            pytest.approx(expected["validation"], rel=1e-9),
        )
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(got["tensors"][name], value, rtol=0, atol=1e-9, msg=name)


def test_other_scores_are_rejected(scores, model, prefix, tmp_path):
    def message(changed: Path, data: str = prefix, **model_options: Any) -> str:
        tree = configuration(model, data, tmp_path, preference={"reference": f"scores:{changed}"})
        tree["model"] |= model_options
        config = from_dict(tree)
        with pytest.raises(ConfigError) as error:
            attach_reference(config, *build(config.data, 0))
        return str(error.value)

    other = write_preferences(tmp_path / "other", LENGTHS, seed=1)
    assert f"has no scores of {other}, as it is now: it has those of {prefix}" in message(scores, other)
    assert "training starts from random weights" in message(scores, init_from=None)
    theirs = tmp_path / "theirs"
    shutil.copytree(scores, theirs)
    record = json.loads((theirs / "scores.json").read_text())
    (theirs / "scores.json").write_text(json.dumps(record | {"weights": "0"}))
    assert "whose weights differ from those of model.init_from" in message(theirs)
    (theirs / "scores.json").write_text(json.dumps(record))
    (file,) = theirs.glob("*.f64")
    values = np.fromfile(file)
    for index, value in ((3, np.nan), (4, 0.5)):
        changed = values.copy()
        changed[index] = value
        changed.tofile(file)
        assert f"is damaged: document {index} of {prefix} has the score {value}" in message(theirs)
    values[:-1].tofile(file)
    assert "has 88 bytes where 12 documents have 96: it is truncated" in message(theirs)
    (theirs / "scores.json").write_text("{")
    assert "is not a record of scores" in message(theirs)
    assert "cannot be read: No such file or directory. Make it with" in message(tmp_path / "none")
    words = [f"hf:{model}", "--data", other, "--output", str(tmp_path)]
    with pytest.raises(SystemExit):
        score.main(words)
