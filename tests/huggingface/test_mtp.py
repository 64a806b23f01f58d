"""Files with modules of multi-token prediction come in and go out unchanged, and a step on them is that of
transformers' layers.

transformers does not train these modules. A module's layer is a layer as the others: the reference is a model of one
layer more, whose last layer runs on what the module makes of the final norm's output and of the following token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.commands import convert as convert_hf
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.evaluation.logits import load_stage, our_logits
from megalite.families.model_config import hf_config, hf_shape
from megalite.generation.sources import open_source
from megalite.huggingface.tensor_places import places
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.huggingface.hf_models import CASES, VOCAB, Case, as_in_files, logits_of, make, random_ids, save, tolerance
from tests.huggingface.test_convert import edit, refusal, same_bytes, stored, write_characters
from tests.support.configs import write_tokens

SEQUENCE, BATCH, BETA, LAYERS = 24, 2, 0.9, 2
NAMES = ["deepseek_v3", "glm4_moe, groups, tied", "deepseek_v32"]


def case_of(name: str) -> Case:
    """A case whose last layer becomes a module's."""
    return CASES[name]._replace(
        fields=CASES[name].fields | {"num_hidden_layers": LAYERS + 1}, dtype=torch.float32, shard="5GB"
    )


def own_parts(hidden: int) -> dict[str, Tensor]:
    """What a module has besides its layer, under the names of files."""
    random = torch.Generator().manual_seed(1)
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    names = {f"model.layers.{LAYERS}.{part}.weight": shape for part, shape in shapes.items()}
    return {name: torch.randn(shape, generator=random) * 0.3 + (len(shape) == 1) for name, shape in names.items()}


def write(name: str, directory: Path) -> Any:
    """A directory of a model with a module; returns transformers' model with the module's layer as its last one."""
    case = case_of(name)
    model = make(case)
    save(model, case, directory)
    tensors = stored(directory)
    (directory / "model.safetensors").unlink()
    table = tensors["model.embed_tokens.weight"]
    module = f"model.layers.{LAYERS}"
    copies = {
        f"{module}.embed_tokens.weight": table,
        f"{module}.shared_head.head.weight": tensors.get("lm_head.weight", table),
    }
    save_file(
        tensors | own_parts(len(table[0])) | {key: value.clone() for key, value in copies.items()},
        directory / "model.safetensors",
    )
    lists = {
        key: value[:LAYERS]
        for key, value in hf_config(directory).items()
        if isinstance(value, list) and len(value) == LAYERS + 1
    }
    edit(directory / "config.json", num_hidden_layers=LAYERS, num_nextn_predict_layers=1, **lists)
    write_characters(directory)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_files_come_back_and_compute_the_same(name: str, tmp_path: Path) -> None:
    """Logits are those of the model without the module, which transformers loads from an export that has none."""
    theirs, ours, again, dropped = (tmp_path / part for part in ("theirs", "ours", "again", "dropped"))
    write(name, theirs)
    assert convert_hf.main(["import", str(theirs), str(ours)]) == 0
    assert convert_hf.main(["export", str(ours), str(again)]) == 0
    assert same_bytes(stored(theirs), stored(again)) and hf_config(again)["num_nextn_predict_layers"] == 1
    assert convert_hf.main(["import", str(theirs), str(tmp_path / "without"), "--drop_mtp"]) == 0
    assert convert_hf.main(["export", str(tmp_path / "without"), str(dropped)]) == 0
    further = f"model.layers.{LAYERS}."
    assert same_bytes(
        {key: value for key, value in stored(theirs).items() if not key.startswith(further)}, stored(dropped)
    )
    assert hf_config(dropped)["num_nextn_predict_layers"] == 0
    ids = random_ids()
    torch.testing.assert_close(
        our_logits(load_stage(open_source(ours)), ids), logits_of(dropped, ids), rtol=0, atol=tolerance(name)
    )


def test_a_file_without_the_weights_of_its_module_has_none(tmp_path: Path) -> None:
    """transformers saves the number of modules, and not their weights."""
    case, theirs, ours = case_of(NAMES[0]), tmp_path / "theirs", tmp_path / "ours"
    save(make(case), case, theirs)
    edit(theirs / "config.json", num_nextn_predict_layers=1)
    write_characters(theirs)
    assert convert_hf.main(["import", str(theirs), str(ours)]) == 0
    assert json.loads((ours / "manifest.json").read_text())["state"]["config"]["model"]["mtp_layers"] == 0


def test_a_module_with_an_embedding_of_its_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/convert_hf.py"])
    theirs = tmp_path / "theirs"
    write(NAMES[0], theirs)
    tensors = stored(theirs)
    tensors[f"model.layers.{LAYERS}.embed_tokens.weight"][3, 5] += 1
    save_file(tensors, theirs / "model.safetensors")
    said = refusal(capsys, "import", theirs, tmp_path / "ours")
    assert f"model.layers.{LAYERS}.embed_tokens.weight and model.embed_tokens.weight differ" in said


def losses_of(model: Any, parts: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of the next token and that of the module, of rows [rows, positions + 1], by transformers'
    layers."""
    given: dict[str, Any] = {}
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = LAYERS
    first = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: given.update(kwargs), with_kwargs=True
    )
    hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    first.remove()
    eps = model.config.rms_norm_eps

    def normed(x: Tensor, part: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], parts[f"model.layers.{LAYERS}.{part}.weight"], eps)

    def mean(x: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(x).flatten(0, 1), targets.flatten())

    embedded = model.model.embed_tokens(rows[:, 1:])
    both = torch.cat((normed(embedded, "enorm"), normed(hidden, "hnorm")), -1)
    x = model.model.layers[LAYERS](both @ parts[f"model.layers.{LAYERS}.eh_proj.weight"].T, **given)
    return mean(hidden, rows[:, 1:]), mean(normed(x, "shared_head.norm")[:, :-1], rows[:, 2:])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_transformers_layers(name: str, tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path, VOCAB, count=200)
    model = write(name, tmp_path / "theirs")
    directory = tmp_path / "theirs"
    config = from_dict(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "model": hf_shape(str(directory)) | {"init_from": f"hf:{directory}", "from_hf": str(directory)},
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
            "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": 1, "grad_clip": 0.0},
            "optimizer": {"betas": [BETA, 0.95], "decay": "constant"},
            "checkpoint": {"load": "none"},
        }
    )
    trainer = Trainer(config, make_mesh(config))
    result = trainer.step()
    ours = global_tensors(trainer, ("exp_avg",))
    trainer.close()
    flat = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    rows = torch.stack([flat[start : start + SEQUENCE + 1] for start in range(0, BATCH * SEQUENCE, SEQUENCE)])
    parts = {key: value.requires_grad_() for key, value in own_parts(config.model.hidden_size).items()}
    own, ahead = losses_of(model, parts, rows)
    (own + 0.3 * ahead).backward()
    assert (result.loss, result.of_model["mtp_loss"]) == pytest.approx((own.item(), ahead.item()), rel=1e-5)
    gradients = as_in_files({key: value.grad for key, value in (*model.named_parameters(), *parts.items())})
    largest = max(value.abs().max().item() for value in gradients.values() if value is not None)
    for key, place in places(config.model, hf_config(directory)["model_type"]).items():
        if ".indexer." in key:  # of a selection, with the loss of indexers off
            assert f"exp_avg/{key}" not in ours and all(gradients[theirs] is None for theirs in place.tensors)
            continue
        gradient = ours[f"exp_avg/{key}"] / (1 - BETA)
        whole = torch.cat([gradients[theirs] for theirs in place.tensors]).view(place.shape)
        expected = place.read(whole, [0] * gradient.dim(), gradient.shape)
        assert (gradient - expected).norm() <= tolerance(name) * expected.norm() + 1e-6 * largest, key
