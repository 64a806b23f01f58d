"""Reward models against TRL's RewardTrainer and transformers' sequence classifiers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalite.assembly.parts import make_mesh
from megalite.commands import convert as convert_hf
from megalite.commands import generate
from megalite.config.load import from_dict
from megalite.families.model_config import families, hf_shape
from megalite.training.trainer import StepResult, Trainer
from tests.objectives.conftest import documents_of
from tests.support.preferences import VOCAB

# AdamW's first update is lr · g / (|g| + eps): with a large eps it is as exact as the gradient
LR, EPS, CENTER, STEPS = 2e-2, 1e-1, 0.2, 2
PAD = VOCAB - 1
ADAPTERS = {"rank": 4, "alpha": 16.0}


def train_here(
    model: Path, prefix: str, place: Path, lora: dict[str, Any], start: str | None = None
) -> list[StepResult]:
    """Train a step more than TRL. Export the weights before, and after its steps."""
    shape = {"from_hf": str(model), "init_from": start or f"hf:{model}", "output_head": "reward"}
    config = from_dict(
        {
            "run": {"dir": str(place), "name": "run"},
            "model": hf_shape(str(model)) | shape,
            "lora": lora,
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": 32, "shuffle": False},
            "train": {
                **{"steps": STEPS + 1, "global_batch_size": 6, "micro_batch_size": 3, "grad_clip": 0.0},
                "objective": "reward",
            },
            "preference": {"center_rewards": CENTER},
            "optimizer": {
                **{"lr": LR, "eps": EPS, "weight_decay": 0.0, "warmup_steps": 0, "betas": [0.9, 0.999]},
                "decay": "constant",
            },
            "checkpoint": {"load": "none"},
        }
    )
    trainer, command = Trainer(config, make_mesh(config)), "adapter-export" if lora else "export"
    assert convert_hf.main([command, str(trainer.save()), str(place / "before")]) == 0
    results = [trainer.step() for _ in range(STEPS)]
    assert convert_hf.main([command, str(trainer.save()), str(place / "after")]) == 0
    results.append(trainer.step())
    trainer.close()
    return results


def classifier(model: Path, exported: Path, adapters: bool) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    if not adapters:
        return AutoModelForSequenceClassification.from_pretrained(exported)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    return PeftModel.from_pretrained(base, exported, is_trainable=True)


def rewards(of: Any, documents: list[list[int]]) -> torch.Tensor:
    """The rewards of texts in one batch with padding."""
    longest = max(map(len, documents))
    rows = torch.tensor([each + [PAD] * (longest - len(each)) for each in documents])
    of.config.pad_token_id = PAD
    with torch.no_grad():
        return of.eval()(input_ids=rows, attention_mask=(rows != PAD).long()).logits.squeeze(-1)


@pytest.mark.parametrize("lora", [{}, ADAPTERS], ids=["full", "adapters"])
def test_trains_as_trl_does(lora, model, prefix, tmp_path):
    from datasets import Dataset
    from peft import get_peft_model_state_dict
    from transformers import AutoTokenizer

    ours, documents = train_here(model, prefix, tmp_path, lora), documents_of(prefix)
    pairs = [{"chosen_ids": a, "rejected_ids": b} for a, b in zip(documents[0::2], documents[1::2], strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import RewardConfig, RewardTrainer

        trained = classifier(model, tmp_path / "before", bool(lora))
        arguments = RewardConfig(
            output_dir=str(tmp_path / "trl"), per_device_train_batch_size=6, learning_rate=LR, adam_epsilon=EPS,
            max_grad_norm=0.0, lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], logging_steps=1,
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=None, max_steps=STEPS,
            center_rewards_coefficient=CENTER, disable_dropout=True,
        )  # fmt: skip
        runs = RewardTrainer(
            model=trained, args=arguments, train_dataset=Dataset.from_list(pairs),
            processing_class=AutoTokenizer.from_pretrained(model),
        )  # fmt: skip
        runs.train()
    for result, expected in zip(ours, runs.state.log_history[:-1], strict=False):
        own = result.of_model
        mean = (own["rewards/chosen"] + own["rewards/rejected"]) / 2
        assert (result.loss, own["rewards/accuracies"], own["rewards/margins"], mean) == pytest.approx(
            (expected["loss"], expected["accuracy"], expected["margin"], expected["mean_reward"]), rel=2e-6, abs=2e-6
        )
    state = get_peft_model_state_dict(trained) if lora else trained.state_dict()
    weights = {name: value for file in tmp_path.glob("after/*.safetensors") for name, value in load_file(file).items()}
    assert weights.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=STEPS * 1e-6, msg=name)
    # the exported model gives the rewards of the run
    theirs = rewards(classifier(model, tmp_path / "after", bool(lora)), documents)
    measured = ours[-1].of_model
    assert (theirs[0::2].mean().item(), theirs[1::2].mean().item()) == pytest.approx(
        (measured["rewards/chosen"], measured["rewards/rejected"]), rel=1e-5
    )


@pytest.mark.parametrize("lora", [{}, ADAPTERS], ids=["full", "adapters"])
def test_the_lines_of_a_card_load_the_export(lora, model, prefix, tmp_path, monkeypatch):
    train_here(model, prefix, tmp_path, lora)
    monkeypatch.chdir(tmp_path)
    card, loaded = Path("after/README.md").read_text(), {}
    exec(card.split("```python\n")[1].split("```")[0], loaded)
    expected, documents = classifier(model, tmp_path / "after", bool(lora)), documents_of(prefix)
    torch.testing.assert_close(rewards(loaded["model"], documents), rewards(expected, documents))
    assert 'pipeline_tag: "text-classification"' in card


def test_an_exported_reward_model_is_read_again(model, prefix, tmp_path, capsys):
    """Its import and export have equal bytes, and a run that starts from it continues with its head."""
    train_here(model, prefix, tmp_path, {})
    after = tmp_path / "after"
    assert convert_hf.main(["import", str(after), str(tmp_path / "imported")]) == 0
    assert convert_hf.main(["export", str(tmp_path / "imported"), str(tmp_path / "again")]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (after / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert hf_shape(str(after))["output_head"] == "reward"
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path / "imported"), "--prompt", "1 2"])
    assert "which predicts no tokens. Export it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert_hf.main(["export", str(tmp_path / "imported"), str(tmp_path / "never"), "--evaluate", "2"])
    assert "--evaluate 2 computes the loss of the next words" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
    (tmp_path / "next").mkdir()
    next_run = train_here(after, prefix, tmp_path / "next", {})
    theirs = rewards(classifier(after, after, False), documents_of(prefix))
    assert next_run[0].of_model["rewards/chosen"] == pytest.approx(theirs[0::2].mean().item(), rel=1e-5)


@pytest.mark.parametrize("imported", [False, True])
def test_an_adapter_of_a_language_model_is_a_start(imported, model, prefix, tmp_path):
    """With the head that a start without it draws."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), options).save_pretrained(tmp_path / "adapter")
    start = str(tmp_path / "imported") if imported else None
    if imported:
        assert convert_hf.main(["import", str(model), str(start)]) == 0
    for place in ("alone", "adapted"):
        lora = ADAPTERS | ({"init_from": str(tmp_path / "adapter")} if place == "adapted" else {})
        train_here(model, prefix, tmp_path / place, lora, start)
    drawn, expected, adapter = (
        load_file(tmp_path / place / "adapter_model.safetensors")
        for place in ("adapted/before", "alone/before", "adapter")
    )
    head = "base_model.model.score.weight"
    assert drawn.keys() == {*adapter, head} and torch.equal(drawn[head], expected[head])
    for name, value in adapter.items():
        torch.testing.assert_close(drawn[name], value, rtol=0, atol=0, msg=name)


def test_families_with_classifiers():
    """They are those of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as THEIRS

    assert {name: row.classifier for name, row in families().rows.items()} == {
        name: THEIRS.get(name) for name in families().rows
    }
