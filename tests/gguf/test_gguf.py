"""megalite convert export --format gguf: the file that the package gguf reads, the logits that transformers computes
from it, and what is rejected before anything is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megalite.commands import convert
from megalite.data.tokenizer.tokenizers import train_sentencepiece
from megalite.gguf.architectures import ARCHITECTURES
from megalite.huggingface.convert import import_model
from tests.data.chats import CHATML, write_tokenizer
from tests.gguf.gguf_cases import CASES
from tests.gguf.texts import TRAINING
from tests.huggingface import hf_models as hf
from tests.huggingface.hf_models import EXPERTS, SIZES, TIED, UNTIED, Case, load, random_ids, write

WIDTH = SIZES["hidden_size"]


def imported(case: Case, place: Path, *, tokenizer: bool = False) -> Path:
    """A checkpoint of a model, in `place` beside its directory."""
    write(case, place / "hf")
    if tokenizer:
        write_tokenizer(place / "hf", CHATML)
    import_model(place / "hf", place / "checkpoint")
    return place / "checkpoint"


def exported(place: Path, *options: str) -> Path:
    words = ["export", str(place / "checkpoint"), str(place / "model.gguf"), "--format", "gguf", *options]
    assert convert.main(words) == 0
    return place / "model.gguf"


def keys_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("name", ["llama, one key-value head", "qwen2, tied"])
def test_transformers_computes_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """transformers reads few architectures of these files; `tests/components/test_llama_cpp.py` has all."""
    imported(CASES[name], tmp_path)
    exported(tmp_path, "--dtype", "f32")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = random_ids()
    with torch.no_grad():
        actual, expected = (model(input_ids=ids, use_cache=False).logits for model in (read, load(tmp_path / "hf")))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_file_has_matrices_in_its_dtype_and_the_tokenizer(tmp_path: Path) -> None:
    sizes = SIZES | UNTIED | EXPERTS | {"num_local_experts": 4, "vocab_size": 448}
    imported(Case("Mixtral", sizes), tmp_path, tokenizer=True)
    reader = gguf.GGUFReader(exported(tmp_path, "--dtype", "bf16"))
    tensors, keys = {each.name: each for each in reader.tensors}, keys_of(reader)
    kinds = {name: each.tensor_type.name for name, each in tensors.items()}
    assert {kind for name, kind in kinds.items() if "norm" in name or "ffn_gate_inp" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name and "ffn_gate_inp" not in name} == {"BF16"}
    assert tensors["blk.0.ffn_gate_exps.weight"].shape.tolist() == [WIDTH, SIZES["intermediate_size"], 4]
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert (keys["llama.expert_count"], keys["llama.expert_used_count"]) == (4, 2)
    settings = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 448
    assert all(tokens[i] == token for token, i in vocabulary.items())
    control = {token["id"] for token in settings["added_tokens"] if token["special"]}
    assert control and {i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL} == control
    assert keys["tokenizer.chat_template"] == CHATML
    assert (
        keys["tokenizer.ggml.eos_token_id"] == json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"]
    )


def test_every_architecture_is_one_of_gguf_and_met_by_llama_cpp() -> None:
    """`tests/components/test_llama_cpp.py` runs every case."""
    known = set(gguf.MODEL_ARCH_NAMES.values())
    tested = {getattr(transformers, f"{case.family}Config").model_type for case in CASES.values()}
    names = {architecture.name for architecture in ARCHITECTURES.values()}
    assert names <= known
    met = {ARCHITECTURES[family].name for family in tested}
    assert names == met


UNSUPPORTED = {
    "family": (Case("Cohere2Moe", hf.CASES["cohere2_moe"].fields), "no architecture that computes cohere2_moe models"),
    "bias": (
        Case("Qwen3", SIZES | TIED | {"attention_bias": True}),
        "architecture qwen3 does not compute this qwen3 model: it\n  - has no bias of attention.k",
    ),
    "dense layers": (
        Case("Qwen3Moe", SIZES | UNTIED | hf.NARROW | {"mlp_only_layers": [1]}),
        "  - has experts in all layers (model.mlp_only_layers, decoder_sparse_step)",
    ),
    "head dim": (Case("Qwen2", hf.CASES["qwen2, tied"].fields | {"head_dim": 12}), "(model.head_dim)"),
    "rope": (
        Case("Qwen3", SIZES | TIED | {"rope_parameters": hf.LLAMA3 | {"rope_theta": 1e4}}),
        "  - has no rotary scaling of type llama3 (model.rope_scaling)",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_llama_cpp_does_not_compute_is_rejected(name: str, tmp_path: Path, capsys) -> None:
    case, said = UNSUPPORTED[name]
    imported(case, tmp_path)
    with pytest.raises(SystemExit):
        exported(tmp_path)
    message = capsys.readouterr().err
    assert said in message and "Export to safetensors instead" in message
    assert [path.name for path in tmp_path.glob("*model.gguf*")] == []


def of_unigrams(content: dict[str, Any]) -> None:
    content["model"] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
    content["pre_tokenizer"] = None


def of_other_pieces(content: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\d{1,5}"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    content["model"]["vocab"]["ab"] = len(content["model"]["vocab"]) + len(content["added_tokens"])
    content["model"]["merges"] = [["a", "b"]]  # without merges, no pre-tokenizer matters


def lowered(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a checkpoint and its directory, with a tokenizer."""
    place = tmp_path_factory.mktemp("model")
    sizes = SIZES | TIED | {"vocab_size": 448, "num_hidden_layers": 1}
    imported(Case("Llama", sizes), place, tokenizer=True)
    return place


@pytest.mark.parametrize(
    "change, said",
    [
        (of_unigrams, "is of type Unigram, or has no bytes"),
        (of_other_pieces, "is none of those that llama.cpp has under the names gpt-2, "),
        (lowered, "has the normalizer Lowercase"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_rejected(
    change: Callable[[dict[str, Any]], None], said: str, with_tokenizer: Path, tmp_path: Path, capsys
) -> None:
    write_tokenizer(tmp_path / "other", CHATML)
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    (tmp_path / "checkpoint").symlink_to(with_tokenizer / "checkpoint")
    options = ("--tokenizer", str(tmp_path / "other"), "--allow_tokenizer_change")
    with pytest.raises(SystemExit):
        exported(tmp_path, *options)
    assert said in capsys.readouterr().err
    if change is of_other_pieces:
        keys = keys_of(gguf.GGUFReader(exported(tmp_path, *options, "--pre", "llama-bpe")))
        assert keys["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(
    "options, said",
    [
        (["--format", "gguf", "--dtype", "fp8"], "--format gguf has no dtype fp8. Legal values: float32"),
        (["--format", "gguf", "--shard_size", "1GB"], "--shard_size has no meaning with --format gguf"),
        (["--pre", "qwen2"], "--pre qwen2 has no meaning without --format gguf"),
    ],
)
def test_options_that_do_not_go_together_are_rejected(
    options: list[str], said: str, with_tokenizer: Path, tmp_path: Path, capsys
) -> None:
    with pytest.raises(SystemExit):
        convert.main(["export", str(with_tokenizer / "checkpoint"), str(tmp_path / "model.gguf"), *options])
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_sentencepiece_has_no_pretokenizer(with_tokenizer: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoint").symlink_to(with_tokenizer / "checkpoint")
    train_sentencepiece(TRAINING[:2], 300, tmp_path / "trained.model")
    with pytest.raises(SystemExit):
        exported(tmp_path, "--tokenizer", str(tmp_path / "trained.model"), "--allow_tokenizer_change", "--pre", "qwen2")
    assert "--pre qwen2: the tokenizer is one of sentencepiece, which has no pre-tokeni" in capsys.readouterr().err


def test_a_file_that_exists_is_kept(with_tokenizer: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "model.gguf").write_bytes(b"mine")
    (tmp_path / "checkpoint").symlink_to(with_tokenizer / "checkpoint")
    with pytest.raises(SystemExit):
        exported(tmp_path)
    assert "model.gguf" in capsys.readouterr().err and (tmp_path / "model.gguf").read_bytes() == b"mine"


def test_a_missing_package_is_one_message(with_tokenizer: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "checkpoint").symlink_to(with_tokenizer / "checkpoint")
    with pytest.raises(SystemExit):
        exported(tmp_path)
    assert "pip install 'megalite[gguf]'" in capsys.readouterr().err
