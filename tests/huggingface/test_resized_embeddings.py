"""A model whose vocabulary grows by added tokens: one step in several layouts is that of transformers with the same new
rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite import checkpoint
from megalite.assembly.parts import make_mesh
from megalite.commands import convert as convert_hf
from megalite.config.load import from_dict
from megalite.families.model_config import hf_shape
from megalite.model.parameters import model_specs
from megalite.system import rng
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.commands.jobs import step_from_hf
from tests.huggingface.hf_models import CASES, VOCAB, load, logits_of, make, random_ids, save
from tests.huggingface.test_layouts import BATCH, BETAS, EPS, LR, SEQUENCE, train
from tests.support.configs import write_tokens
from tests.support.pool import RankPool

GROWN = VOCAB + 30  # under tp 2 a rank has old and new rows, and padding
LAYOUTS = {
    "llama, tied, llama3 rope": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "qwen3, yarn rope": {"dp": 2, "tp": 2, "zero": 3},
    "gpt2": {"pp": 2, "dp": 2, "zero": 1},
}


def configuration(directory: Path, prefix: str, place: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    shape = hf_shape(str(directory)) | {"vocab_size": GROWN, "init_from": f"hf:{directory}", "from_hf": str(directory)}
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(place), "name": "run"},
        "model": shape | {"resize_embeddings": "mean"},
        "parallel": {"dp": 1},
        "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
        "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH // 2, "grad_clip": 0.0},
        "optimizer": {"lr": LR, "eps": EPS, "betas": BETAS, "weight_decay": 0.0, "decay": "constant"},
        "checkpoint": {"load": "none"},
    }
    return tree | {name: tree.get(name, {}) | values for name, values in sections.items()}


def grow(model: Any) -> None:
    """transformers' own enlargement; its new rows are samples about the mean, ours the mean itself."""
    means = [table.weight.detach().double().mean(0) for table in tables(model)]
    model.resize_token_embeddings(GROWN, mean_resizing=False)
    with torch.no_grad():
        for table, mean in zip(tables(model), means, strict=True):
            table.weight[VOCAB:] = mean


def tables(model: Any) -> list[Any]:
    return [
        model.get_input_embeddings(),
        *([] if model.config.tie_word_embeddings else [model.get_output_embeddings()]),
    ]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), GROWN, count=400)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_with_new_rows_is_that_of_transformers(name: str, prefix: str, ranks: RankPool, tmp_path: Path):
    case = CASES[name]._replace(dtype=torch.float32)
    model = make(case)
    save(model, case, tmp_path / "theirs")
    config = configuration(tmp_path / "theirs", prefix, tmp_path, parallel={"dp": 1} | LAYOUTS[name])
    config["train"]["micro_batch_size"] = BATCH // 2 // config["parallel"]["dp"]
    saved, *_ = ranks.run(4, step_from_hf, config)
    grow(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, prefix)
    assert convert_hf.main(["export", saved, str(tmp_path / "out")]) == 0
    exported = load(tmp_path / "out")
    assert exported.config.vocab_size == GROWN
    for key, value in model.state_dict().items():
        change = (value - before[key]).norm()
        assert (exported.state_dict()[key] - value).norm() <= 1e-4 * change + 1e-6 * value.norm(), key


def started(config: dict[str, Any]) -> Trainer:
    run_config = from_dict(config)
    return Trainer(run_config, make_mesh(run_config))


def table_of(trainer: Trainer, name: str = "embedding.weight") -> Tensor:
    return global_tensors(trainer)[f"weight/{name}"]


def test_rows_are_drawn_as_those_of_a_new_model_and_come_from_a_checkpoint_too(prefix: str, tmp_path: Path):
    case = CASES["qwen3, yarn rope"]
    save(make(case), case, tmp_path / "theirs")
    assert convert_hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "imported")]) == 0
    results = {}
    for start in (f"hf:{tmp_path / 'theirs'}", str(tmp_path / "imported")):
        config = configuration(tmp_path / "theirs", prefix, tmp_path)
        config["model"] |= {"init_from": start, "resize_embeddings": "init"}
        trainer = started(config)
        results[start] = table_of(trainer, "head.weight")
        (segment,) = (s for spec in model_specs(trainer.config.model) for s in spec.segments if s.name == "head.weight")
        drawn = torch.cat(list(rng.drawn_rows(segment, 0, GROWN, trainer.config.run.seed)))
        assert torch.equal(results[start][VOCAB:], drawn[VOCAB:]), "the rows of a random model of this vocabulary"
        trainer.close()
    one, other = results.values()
    assert torch.equal(one, other)


def test_adapters_train_the_new_rows_and_leave_with_them(prefix: str, tmp_path: Path):
    """Merged, and as PEFT reads them on a base that transformers has resized."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = CASES["llama, biases, head_dim"]
    save(make(case), case, tmp_path / "theirs")
    lora = {"rank": 2, "modules_to_save": ["embedding", "head"]}
    config = configuration(
        tmp_path / "theirs", prefix, tmp_path, lora=lora, optimizer={"lr": 1e-2, "decay": "constant"}
    )
    trainer = started(config)
    before = table_of(trainer)
    torch.testing.assert_close(
        before[VOCAB:], before[:VOCAB].double().mean(0).float().expand(GROWN - VOCAB, -1), rtol=0, atol=0
    )
    trainer.step()
    assert (table_of(trainer)[VOCAB:] != before[VOCAB:]).any()
    saved = trainer.save()
    trainer.close()
    assert convert_hf.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    assert convert_hf.main(["adapter-export", str(saved), str(tmp_path / "adapter")]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32, attn_implementation="eager")
    base.resize_token_embeddings(GROWN, mean_resizing=False)
    ids = random_ids(tokens=SEQUENCE)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, logits_of(tmp_path / "merged", ids), rtol=0, atol=1e-5)


def test_a_vocabulary_that_does_not_fit_is_named_with_both_ways_out(prefix: str, tmp_path: Path):
    case = CASES["qwen3, yarn rope"]
    save(make(case), case, tmp_path / "theirs")
    assert convert_hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "imported")]) == 0
    for start in (f"hf:{tmp_path / 'theirs'}", str(tmp_path / "imported")):
        config = configuration(tmp_path / "theirs", prefix, tmp_path)
        config["model"] |= {"init_from": start, "resize_embeddings": None}
        with pytest.raises(
            checkpoint.CheckpointError, match=f"vocab_size={GROWN}.*{VOCAB} tokens.*resize_embeddings=mean.*prepare"
        ):
            started(config)
        config["model"] |= {"vocab_size": 64, "resize_embeddings": "mean"}
        config["data"]["train"] = write_tokens(tmp_path, 64, count=400)
        with pytest.raises(checkpoint.CheckpointError, match=f"cannot be shrunk.*{VOCAB}"):
            started(config)
