"""`megalite convert check --train_steps`: training steps beside transformers, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.commands import convert as convert_hf
from megalite.config.sections.model import ModelConfig
from megalite.huggingface import convert as converting
from megalite.huggingface import source
from megalite.huggingface.config_json import without_training_options
from tests.huggingface.hf_models import CASES, Case, write

CHECK = ["--tokens", "12", "--train_steps"]
# one case for each way in which tensors of a file differ from ours: tied, packed, by head, stacked experts in one
# tensor and in many, convolutions, latents with yarn's factors
NAMES = ["llama, tied, llama3 rope", "phi3, partial rope, window", "gemma2", "gpt_neox", "gpt2", "gpt_oss"]
NAMES += ["mixtral", "deepseek_v2, lite, yarn rope", "qwen3_next", "olmo_hybrid", "granitemoehybrid", "deepseek_v32"]


def single(name: str) -> Case:
    return CASES[name]._replace(dtype=torch.float32, shard="5GB")


def check(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = convert_hf.main(["check", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def exceeding(report: dict[str, Any], kind: str) -> list[str]:
    """The tensors of which a kind of values differs by more than rounding, the worst first."""
    bound = report["bounds"]["gradient" if kind == "gradient" else "weight"]
    return [each["tensor"] for each in report["tensors"][kind] if each["error"] > bound]


def alter(directory: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> Path:
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))
    return directory


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_transformers(name: str, dtype: str, tmp_path: Path, capsys) -> None:
    theirs = write(single(name), tmp_path / "theirs")
    status, report = check(capsys, theirs, theirs, *CHECK, "2", "--dtype", dtype)
    training = report["training"]
    assert (status, training["equal"]) == (0, True), training
    named = {each["tensor"].partition(" (")[0] for each in training["tensors"]["gradient"]}
    in_file = load_file(theirs / "model.safetensors")
    untrained = ("e_score_correction_bias", ".indexer.")  # transformers has no loss for an indexer
    assert named <= in_file.keys() and named >= {key for key in in_file if not any(each in key for each in untrained)}


LAYER = "model.layers.0"
# a fault that no weight shows: fields of our model that differ, the first suspect, and what is said of it
FAULTS = {
    "offset of norms": ("gemma", {"norm_offset": 0.0}, f"{LAYER}.input_layernorm.weight", "this norm's output"),
    "offset, LayerNorm": ("nemotron", {"norm_offset": 0.0}, f"{LAYER}.input_layernorm.weight", "3 of 3 layers"),
    "scale of embeddings": ("gemma", {"embedding_scale": 1.0}, "model.embed_tokens.weight", "first layer"),
    "rope base": (
        "llama, biases, head_dim",
        {"rope_theta": 5e5},
        f"{LAYER}.self_attn (q_proj, k_proj, v_proj)",
        "that of o_proj differs from position 1 on",
    ),
    "activation": (
        "llama, biases, head_dim",
        {"hidden_act": "gelu"},
        f"{LAYER}.mlp (gate_proj, up_proj)",
        "that of down_proj differs (3 of 3",
    ),
    "window": (
        "mistral, window",
        {"sliding_window": 7},
        f"{LAYER}.self_attn (q_proj, k_proj, v_proj)",
        "that of o_proj differs from position 5 on",
    ),
    "residual factor": ("granite", {"residual_multiplier": 0.7}, LAYER, "but their sum differs"),
    "residual factor beside others": (
        "mimo_v2_flash",
        {"residual_multiplier": 0.7},
        "model.layers.0",
        "on the same input, its output differs",
    ),
    "names of another beginning": ("nemotron_h", {"rms_norm_eps": 1e-2}, "backbone.layers.0.norm.weight", "norm's"),
    "cap of logits": ("gemma2, caps that act", {"logit_softcap": None}, "model.embed_tokens.weight", "logits differ"),
}


def damaged(theirs: Path, ours: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the same weights with other fields of the model."""
    read = source.from_hf_config
    with monkeypatch.context() as patch:
        patch.setattr(source, "from_hf_config", lambda config: read(config) | fields)
        assert convert_hf.main(["import", str(theirs), str(ours)]) == 0
    return ours


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_part_that_differs_is_the_suspect(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    case, fields, place, reason = FAULTS[name]
    theirs = write(single(case), tmp_path / "theirs")
    ours = damaged(theirs, tmp_path / "ours", fields, monkeypatch)
    status, report = check(capsys, ours, theirs, "--tokens", "12", "--tolerance", "1e-6")
    suspect = report["suspect"]
    assert status == 1 and suspect["place"].startswith(place) and reason in suspect["reason"], suspect


@pytest.mark.parametrize(
    ("case", "place"), [("llama, biases, head_dim", f"{LAYER}.mlp (gate_proj, up_proj)"), ("olmo2", LAYER)]
)
def test_factors_of_mup_are_no_difference(case: str, place: str, tmp_path: Path, capsys, monkeypatch) -> None:
    """The export has them in its matrices and norms: what is named is the activation, which was changed in it."""
    theirs = write(single(case), tmp_path / "theirs")
    mup = {"mup": {"base_width": 16, "base_depth": 1}}
    ours = damaged(theirs, tmp_path / "ours", mup, monkeypatch)
    assert convert_hf.main(["export", str(ours), str(tmp_path / "plain")]) == 0
    assert check(capsys, ours, tmp_path / "plain", "--tokens", "12")[0] == 0
    other = alter(tmp_path / "plain", {}, {"hidden_act": "gelu"})
    status, report = check(capsys, ours, other, "--tokens", "12", "--tolerance", "1e-6")
    suspect = report["suspect"]
    assert status == 1 and suspect["place"] == place, suspect


@pytest.mark.parametrize("part", ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.gate_proj.weight"])
def test_a_tensor_that_was_converted_wrongly_is_the_suspect(part: str, tmp_path: Path, capsys) -> None:
    """Two rows of the first layer's tensor are swapped, and of a gate all are those of up."""
    theirs, ours = write(single("llama, biases, head_dim"), tmp_path / "theirs"), tmp_path / "ours"
    name = f"model.layers.1.{part}"
    tensors = load_file(theirs / "model.safetensors")
    wrong = tensors[name][[1, 0, *range(2, len(tensors[name]))]]
    changed = {name: wrong}
    if "gate" in part:
        up = name.replace("gate", "up")
        changed = {name: tensors[up], up: tensors[name]}
    other = alter(Path(shutil.copytree(theirs, tmp_path / "damaged")), changed, {})
    assert convert_hf.main(["import", str(other), str(ours)]) == 0
    status, report = check(capsys, ours, theirs, *CHECK, "1")
    assert status == 1 and sorted(exceeding(report["training"], "weight at the start")) == sorted(changed)
    assert changed.keys() <= set(exceeding(report["training"], "gradient"))
    assert report["suspect"]["place"] in changed and "weights at the start" in report["suspect"]["reason"]
    assert convert_hf.main(["check", str(ours), str(theirs), *CHECK, "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"first suspect: {report['suspect']['place']}: its weights at the start differ, by ")


def test_an_epsilon_is_found_where_inputs_are_small(tmp_path: Path, capsys) -> None:
    theirs, ours = write(single("llama, biases, head_dim"), tmp_path / "theirs"), tmp_path / "ours"
    embedding = "model.embed_tokens.weight"
    small = {embedding: load_file(theirs / "model.safetensors")[embedding] * 0.05}
    alter(theirs, small, {"rms_norm_eps": 1e-5})
    other = alter(Path(shutil.copytree(theirs, tmp_path / "other")), {}, {"rms_norm_eps": 1e-6})
    assert convert_hf.main(["import", str(other), str(ours)]) == 0
    status, report = check(capsys, ours, theirs, *CHECK, "1", "--dtype", "float64")
    assert status == 1 and not exceeding(report["training"], "weight at the start")
    assert embedding in exceeding(report["training"], "gradient")
    assert report["suspect"]["place"] == f"{LAYER}.input_layernorm.weight"
    assert check(capsys, other, other, *CHECK, "1", "--dtype", "float64")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "float64"], "Set --train_steps too"),
        (["--train_steps", "0"], "'0' is not a positive integer"),
    ],
)
def test_bad_input_is_one_message(words: list[str], said: str, tmp_path: Path, capsys) -> None:
    theirs = write(single("gemma"), tmp_path / "theirs")
    capsys.readouterr()  # transformers' progress
    with pytest.raises(SystemExit) as stopped:
        convert_hf.main(["check", str(theirs), str(theirs), *words])
    message = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and said in message and len(message.splitlines()) == 1


def test_a_checkpoint_needs_a_directory_to_compare_with(tmp_path: Path, capsys) -> None:
    theirs = write(single("gemma"), tmp_path / "theirs")
    converting.import_model(theirs, tmp_path / "ours")
    with pytest.raises(SystemExit) as stopped:
        convert_hf.main(["check", str(tmp_path / "ours")])
    assert stopped.value.code == 2 and "ours is not a Hugging Face directory" in capsys.readouterr().err
    assert convert_hf.main(["check", str(theirs), *CHECK, "1"]) == 0


def test_another_model_is_rejected(tmp_path: Path, capsys) -> None:
    theirs = write(single("llama, biases, head_dim"), tmp_path / "theirs")
    wide = write(single("qwen3, tied"), tmp_path / "wide")
    with pytest.raises(SystemExit) as stopped:
        convert_hf.main(["check", str(theirs), str(wide), *CHECK, "1"])
    assert stopped.value.code == 2 and "does not match" in capsys.readouterr().err


def test_steps_have_no_losses_besides_cross_entropy() -> None:
    losses = {"index_loss_coef": 1.0, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1, "mtp_layers": 1}
    model = ModelConfig(attention_dropout=0.1, router_balance="bias", **losses)
    assert without_training_options(model) == ModelConfig(router_balance="global")
