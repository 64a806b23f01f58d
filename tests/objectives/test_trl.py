"""Every objective against TRL's trainer: from the same weights to the same weights.

One step of one batch; two with a reference model, from which the first step does not differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.commands import convert as convert_hf
from megalite.config.load import from_dict
from megalite.families.model_config import hf_shape
from megalite.training.trainer import StepResult, Trainer
from tests.objectives.conftest import LENGTHS, documents_of
from tests.support.preferences import write_labelled

LABELS = [True, False, False, True, True, False]
# AdamW's first update is lr · g / (|g| + eps): with a large eps it is as exact as the gradient
LR, EPS = 2e-2, 1e-1
LORA = {"rank": 4, "alpha": 16.0}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    # our objective and options, TRL's trainer and options
    "dpo, hinge": ("dpo", {"loss": "hinge"}, "DPO", {"loss_type": ["hinge"]}),
    "dpo, robust, with likelihood": (
        "dpo",
        {"loss": "robust", "label_smoothing": 0.2, "nll_weight": 0.5},
        "DPO",
        {"loss_type": ["robust", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.2},
    ),
    "dpo, means over tokens": (
        "dpo",
        {"loss": "sigmoid_norm", "beta": 2.0},
        "DPO",
        {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    ),
    "dpo, exo": (
        "dpo",
        {"loss": "exo_pair", "label_smoothing": 0.01},
        "DPO",
        {"loss_type": ["exo_pair"], "label_smoothing": 0.01},
    ),
    **{
        f"dpo, {loss}": ("dpo", {"loss": loss, "beta": 0.3}, "DPO", {"loss_type": [loss], "beta": 0.3})
        for loss in ("discopop", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
    },
    "ipo": ("ipo", {"beta": 0.5}, "DPO", {"loss_type": ["ipo"], "beta": 0.5}),
    "simpo": ("simpo", {"beta": 2.0, "gamma": 1.0}, "CPO", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}),
    "cpo": (
        "cpo",
        {"label_smoothing": 0.1, "nll_weight": 0.7},
        "CPO",
        {"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.7},
    ),
    "cpo, hinge": ("cpo", {"loss": "hinge"}, "CPO", {"loss_type": "hinge"}),
    "orpo": ("orpo", {}, "ORPO", {}),
    "kto": (
        "kto",
        {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        "KTO",
        {"desirable_weight": 1.5, "undesirable_weight": 0.5, "train_sampling_strategy": "sequential"},
    ),
}
CASES["simpo"][3]["cpo_alpha"] = 0.0
REFERRED = ("dpo", "ipo", "kto")
WHOLE = ("dpo, robust, with likelihood", "ipo", "kto")  # also with all parameters trained


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_labelled(tmp_path_factory.mktemp("data") / "x", [row[:2] for row in LENGTHS], LABELS)


def records(prefix: str, labels: Sequence[bool] = ()) -> list[dict[str, Any]]:
    """The pairs, or the completions with their labels, as texts without their end, which TRL appends."""
    documents, pairs = documents_of(prefix), []

    def text(tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    if labels:
        return [
            {"prompt": text(each[:prompt]), "completion": " " + text(each[prompt:-1]), "label": label}
            for (prompt, *_), each, label in zip(LENGTHS, documents, labels, strict=True)
        ]
    for (prompt, *_), chosen, rejected in zip(LENGTHS, documents[0::2], documents[1::2], strict=True):
        completions = {"chosen": " " + text(chosen[prompt:-1]), "rejected": " " + text(rejected[prompt:-1])}
        pairs.append({"prompt": text(chosen[:prompt])} | completions)
    return pairs


def train_here(
    model: Path,
    prefix: str,
    place: Path,
    objective: str,
    options: dict[str, Any],
    steps: int,
    lora: dict[str, Any],
    **changes: dict[str, Any],
) -> list[StepResult]:
    """Train and export the weights before and after, those of an adapter with `lora`."""
    config = from_dict(
        {
            "run": {"dir": str(place), "name": "run"},
            "model": hf_shape(str(model)) | {"from_hf": str(model), "init_from": f"hf:{model}"},
            "lora": lora,
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": 32, "shuffle": False} | changes.get("data", {}),
            "train": {
                **{"steps": steps, "global_batch_size": 6, "micro_batch_size": 3, "objective": objective},
                "grad_clip": 0.0,
            }
            | changes.get("train", {}),
            "preference": options,
            "optimizer": {
                **{"lr": LR, "eps": EPS, "weight_decay": 0.0, "warmup_steps": 0, "betas": [0.9, 0.999]},
                "decay": "constant",
            },
            "checkpoint": {"load": "none"},
        }
    )
    trainer, command = Trainer(config, make_mesh(config)), "adapter-export" if lora else "export"
    assert convert_hf.main([command, str(trainer.save()), str(place / "before")]) == 0
    results = [trainer.step() for _ in range(steps)]
    assert convert_hf.main([command, str(trainer.save()), str(place / "after")]) == 0
    trainer.close()
    return results


def train_there(
    model: Path, adapter: Path | None, data: list[dict[str, Any]], place: Path, trainer: str, options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train with TRL. Returns the metrics of each step, and the trained weights by name."""
    from datasets import Dataset
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if trainer == "DPO":
            from trl import DPOConfig as Options
            from trl import DPOTrainer as Runs
        elif trainer == "CPO":
            from trl.experimental.cpo import CPOConfig as Options
            from trl.experimental.cpo import CPOTrainer as Runs
        elif trainer == "KTO":
            from trl import KTOConfig as Options
            from trl import KTOTrainer as Runs
        else:
            from trl.experimental.orpo import ORPOConfig as Options
            from trl.experimental.orpo import ORPOTrainer as Runs
        arguments = Options(
            output_dir=str(place), learning_rate=LR, adam_epsilon=EPS, max_grad_norm=0.0,
            lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], logging_steps=1, save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, max_length=None,
            **{"per_device_train_batch_size": 6} | options,
        )  # fmt: skip
        trained = AutoModelForCausalLM.from_pretrained(model)
        if adapter is not None:
            trained = PeftModel.from_pretrained(trained, adapter, is_trainable=True)
        second = trainer in ("DPO", "KTO") and adapter is None
        runs = Runs(
            model=trained, args=arguments, train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(model),
            **{"ref_model": AutoModelForCausalLM.from_pretrained(model)} if second else {},
        )  # fmt: skip
        runs.train()
    state = trained.state_dict() if adapter is None else get_peft_model_state_dict(trained)
    return runs.state.log_history[:-1], state


@pytest.mark.parametrize("case, whole", [*((case, False) for case in CASES), *((case, True) for case in WHOLE)])
def test_trains_as_trl_does(case, whole, model, prefix, labelled, tmp_path):
    """With a reference: adapters, or all parameters and a second model in TRL."""
    objective, options, trainer, their_options = CASES[case]
    reference = objective in REFERRED
    steps, lora = 2 if reference else 1, LORA if reference and not whole else {}
    adapter = tmp_path / "before" if lora else None
    data, labels = (labelled, LABELS) if objective == "kto" else (prefix, ())
    ours = train_here(model, data, tmp_path, objective, options, steps, lora)
    their_options = {**their_options, "max_steps": steps}
    metrics, theirs = train_there(model, adapter, records(data, labels), tmp_path / "trl", trainer, their_options)
    for result, expected in zip(ours, metrics, strict=True):
        assert result.loss == pytest.approx(expected["loss"], rel=2e-6)
        # without a reference some of TRL's log-probabilities are means over tokens
        names = result.of_model.keys() - (set() if reference else {"logps/chosen", "logps/rejected"})
        assert {name: result.of_model[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=2e-6
        )
    assert objective != "kto" or metrics[-1]["kl"] > 1e-3, "the term makes a difference"
    assert largest_difference(tmp_path, theirs) <= steps * 1e-6


def largest_difference(place: Path, theirs: dict[str, Tensor], when: str = "after") -> float:
    """Of a weight from TRL's."""
    files = sorted(place.glob(f"{when}/*.safetensors"))
    trained = {name: value for file in files for name, value in load_file(file).items()}
    assert trained.keys() == theirs.keys()
    return max((trained[name] - value).abs().max().item() for name, value in theirs.items())


@pytest.mark.parametrize("start", ["a new adapter", "an adapter", "all parameters"])
def test_twenty_steps_of_dpo_beside_trl(start, model, prefix, tmp_path):
    """Batches of two pairs, in order. An adapter that is continued is its own reference, in TRL a copy of it."""
    lora = {} if start == "all parameters" else LORA
    if start == "an adapter":
        train_here(model, prefix, tmp_path / "first", "dpo", {}, 3, lora)
        lora = lora | {"init_from": str(tmp_path / "first" / "after")}
    one = {"data": {"packing": False}, "train": {"global_batch_size": 2, "micro_batch_size": 2}}
    ours = train_here(model, prefix, tmp_path, "dpo", {"beta": 0.3}, 20, lora, **one)
    options = {"beta": 0.3, "max_steps": 20, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
    adapter = tmp_path / "before" if lora else None
    metrics, theirs = train_there(model, adapter, records(prefix), tmp_path / "trl", "DPO", options)
    assert ours[0].loss == pytest.approx(0.6931472, rel=1e-6), "the reference is the start"
    losses = [each["loss"] for each in metrics]
    # AdamW adds up what rounding does to 20 gradients: 3e-7 and 8e-7 were measured
    assert largest_difference(tmp_path, theirs) <= 1e-6 < 0.1 < largest_difference(tmp_path, theirs, "before")
    assert [result.loss for result in ours] == pytest.approx(losses, rel=0, abs=2e-6)
