"""tools/convert_hf.py: models that transformers writes come in, go out unchanged, and compute the same on both
sides."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megalite_kernels import block_formats
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint import manifest_of
from megalite.commands import convert as convert_hf
from megalite.evaluation.logits import load_stage, our_logits
from megalite.families.model_config import hf_config, stored_dtype
from megalite.generation.sources import open_source
from megalite.huggingface import convert as converting
from megalite.huggingface.files import ConversionError
from megalite.huggingface.original import model_of
from megalite.huggingface.router_bias import to_export
from megalite.huggingface.source import HuggingFaceSource
from tests.huggingface.hf_models import (
    CASES,
    CONSTANTS,
    ROUTER_BIAS,
    VOCAB,
    add_tensors,
    load,
    logits_of,
    make,
    model_type,
    random_ids,
    save,
    tolerance,
    write,
    write_multimodal,
    write_qwen_multimodal,
)


def stored(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, read by the safetensors library."""
    results = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            results |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return results


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name], other[name])
        for name in one
    )


@pytest.fixture(autouse=True)
def called_as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages begin with the name under which the program was started."""
    monkeypatch.setattr(sys, "argv", ["tools/convert_hf.py"])


def write_characters(directory: Path) -> None:
    """The files of a tokenizer of ASCII's characters."""
    entries = {chr(letter): letter - 32 for letter in range(32, 127)}
    model = {"type": "WordLevel", "vocab": {**entries, "<eos>": 95}, "unk_token": " "}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": model,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )


@pytest.mark.parametrize("name", CASES)
def test_a_model_goes_in_and_out_and_computes_the_same(name, tmp_path: Path, capsys):
    case = CASES[name]
    theirs, ours, again = write(case, tmp_path / "theirs"), tmp_path / "ours", tmp_path / "again"
    write_characters(theirs)
    assert convert_hf.main(["import", str(theirs), str(ours)]) == 0
    assert convert_hf.main(["export", str(ours), str(again), "--shard_size", case.shard, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["family"] == hf_config(theirs)["model_type"]
    assert summary["parameters"] == sum(
        tensor.numel() for key, tensor in stored(theirs).items() if not key.endswith((*ROUTER_BIAS, *CONSTANTS))
    )
    assert same_bytes(stored(theirs), stored(again))
    assert stored_dtype(hf_config(again)) == stored_dtype(hf_config(theirs))
    for beside in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (again / beside).read_bytes() == (theirs / beside).read_bytes()
    assert (again / "model.safetensors.index.json").exists() == (case.shard != "5GB")
    ids = random_ids()
    expected = logits_of(again, ids)
    torch.testing.assert_close(expected, logits_of(theirs, ids), rtol=0, atol=0)
    torch.testing.assert_close(our_logits(load_stage(open_source(ours)), ids), expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", ["gemma3", "ministral3", "mistral4"])
def test_the_language_model_of_a_multimodal_model_comes_in(name: str, tmp_path: Path) -> None:
    """Its export is the language model alone."""
    theirs, ours, out = tmp_path / "theirs", tmp_path / "ours", tmp_path / "out"
    model = write_multimodal(name, theirs)
    assert convert_hf.main(["import", str(theirs), str(ours)]) == 0
    assert convert_hf.main(["export", str(ours), str(out)]) == 0
    language = {
        name.removeprefix("language_model."): value
        for name, value in stored(theirs).items()
        if name.startswith("language_model.")
    }
    assert same_bytes(language, stored(out)) and len(language) < len(stored(theirs))
    assert hf_config(out)["model_type"] == model_type(name) and hf_config(out)["eos_token_id"] == [2, 9]
    ids = random_ids() % 90 + 10  # none of an image
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits_of(out, ids), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_logits(load_stage(open_source(ours)), ids), expected, rtol=0, atol=1e-4)
    assert convert_hf.main(["check", str(ours), str(out), "--tokens", "9"]) == 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_multimodal_model_goes_out_with_what_is_not_read(name: str, tmp_path: Path) -> None:
    """Its vision tower, its module of multi-token prediction and its other fields are unchanged."""
    theirs, ours, out = tmp_path / "theirs", tmp_path / "ours", tmp_path / "out"
    model = write_qwen_multimodal(name, theirs)
    summary = converting.import_model(theirs, ours)
    assert "tensors kept aside, which an export writes again: 2 of mtp.*, 21 of model.visual.*" in summary["notes"]
    assert convert_hf.main(["export", str(ours), str(out), "--shard_size", "20KB"]) == 0
    assert same_bytes(stored(theirs), stored(out))
    before, after = (json.loads((each / "config.json").read_text()) for each in (theirs, out))
    assert {key: after[key] for key in before if key not in ("text_config", "dtype")} == {
        key: before[key] for key in before if key not in ("text_config", "dtype")
    }
    assert {key: after["text_config"][key] for key in before["text_config"]} == before["text_config"]
    assert (out / "preprocessor_config.json").read_bytes() == (theirs / "preprocessor_config.json").read_bytes()
    again = type(model).from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(again[1].values())
    ids = random_ids() % 90 + 10  # none of an image
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(again[0](input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(our_logits(load_stage(open_source(ours)), ids), expected, rtol=0, atol=1e-4)
    converting.export_model(ours, tmp_path / "bf16", dtype=torch.bfloat16)
    aside = {key: value for key, value in stored(theirs).items() if key.startswith(("mtp.", "model.visual."))}
    assert same_bytes({key: stored(tmp_path / "bf16")[key] for key in aside}, aside)


@pytest.mark.parametrize(
    "name, more",
    [
        ("olmo_hybrid", "mtp.fc.weight"),
        ("exaone_moe", "mtp.fc.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight"),
        ("hy_v3", "model.layers.3.eh_proj.weight"),
    ],
)
def test_modules_that_transformers_does_not_read_go_out_again(name: str, more: str, tmp_path: Path) -> None:
    case = CASES[name]._replace(shard="5GB")
    theirs, ours, out = write(case, tmp_path / "theirs"), tmp_path / "ours", tmp_path / "out"
    add_tensors(theirs, {more: torch.randn(32, 64)})
    converting.import_model(theirs, ours)
    converting.export_model(ours, out)
    assert same_bytes(stored(theirs), stored(out))
    if name != "hy_v3":  # transformers ignores layer 80, whatever the number of layers is
        load(out)
    converting.import_model(theirs, tmp_path / "without", mtp=False)
    converting.export_model(tmp_path / "without", tmp_path / "less")
    assert stored(out).keys() - stored(tmp_path / "less").keys() == {more}


def test_biases_of_routers_are_not_left_out(tmp_path: Path) -> None:
    """A run may have moved those of a model whose files have none."""
    converting.import_model(write(CASES["minimax_m2"], tmp_path / "theirs"), tmp_path / "ours")
    manifest = manifest_of(tmp_path / "ours")
    with pytest.raises(ConversionError, match="biases of routers, which files of cohere2_moe models do not have"):
        to_export(manifest, model_of(manifest), "cohere2_moe")


@pytest.mark.parametrize("name", ["olmo_hybrid", "kimi_linear"])
def test_names_that_only_transformers_writes_come_in(name: str, tmp_path: Path) -> None:
    """It writes the convolutions of q, k and v in parts of equal size, and names of one kind of layer in all."""
    model, own = make(CASES[name]), tmp_path / "own"
    model.save_pretrained(own)
    published = HuggingFaceSource.of(write(CASES[name], tmp_path / "published"))
    source = HuggingFaceSource.of(own)
    assert stored(own).keys() != stored(tmp_path / "published").keys()
    for key, place in source.places.items():
        whole = [len(place.rows), *place.shape[1:]]
        assert torch.equal(source.read(key, [0] * len(whole), whole), published.read(key, [0] * len(whole), whole)), key
    name = "layers.0.mixer.conv_v.weight"
    assert torch.equal(source.read(name, [3, 1], [5, 2]), published.read(name, [3, 1], [5, 2]))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe, a dense layer", "qwen3_5_moe_text"])
def test_experts_come_in_from_a_fused_file(name, tmp_path: Path) -> None:
    """A model's parameters as transformers 5 has them in memory: experts.gate_up_proj [experts, 2 width, hidden] and
    experts.down_proj."""
    theirs, fused = write(CASES[name], tmp_path / "theirs"), tmp_path / "fused"
    fused.mkdir()
    shutil.copyfile(theirs / "config.json", fused / "config.json")
    save_file({key: value.clone() for key, value in load(theirs).state_dict().items()}, fused / "model.safetensors")
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in stored(fused))
    each, stacked = HuggingFaceSource.of(theirs), HuggingFaceSource.of(fused)
    for key, place in each.places.items():
        whole = [len(place.rows), *place.shape[1:]]
        assert torch.equal(each.read(key, [0] * len(whole), whole), stacked.read(key, [0] * len(whole), whole)), key
    part = ([31, 5], [40, 9])  # rows of several experts
    assert torch.equal(
        each.read("layers.0.mlp.experts.in.weight", *part), stacked.read("layers.0.mlp.experts.in.weight", *part)
    )


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    """Random codes and scales in a file, read whole, in part and imported; transformers' own conversion of them is the
    reference."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    fields = CASES["gpt_oss"].fields | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    case = CASES["gpt_oss"]._replace(fields=fields, dtype=torch.bfloat16, shard="5GB")
    theirs, packed, out = write(case, tmp_path / "theirs"), tmp_path / "packed", tmp_path / "out"
    packed.mkdir()
    config = hf_config(theirs) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    (packed / "config.json").write_text(json.dumps(config))
    tensors, expected = {}, stored(theirs)
    for key, value in expected.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = value
            continue
        experts, columns, rows = value.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(tensors, packed / "model.safetensors")
    write_characters(packed)
    source = HuggingFaceSource.of(packed)
    name, part = "layers.1.mlp.experts.in.weight", ([150, 3], [250, 40])  # rows of three experts
    whole = source.read(name, [0, 0], source.places[name].shape)
    assert torch.equal(source.read(name, *part), whole[150:400, 3:43])
    assert torch.equal(block_formats.rounded(whole.float(), "mxfp4", 32), whole.float()), "as a base they stay"
    assert convert_hf.main(["import", str(packed), str(tmp_path / "ours")]) == 0
    assert convert_hf.main(["export", str(tmp_path / "ours"), str(out)]) == 0
    assert same_bytes(stored(out), expected) and "quantization_config" not in hf_config(out)


LLAMA = CASES["llama, tied, llama3 rope"]
SHARDED = CASES["llama, one key-value head"]


@pytest.mark.parametrize("block", [70, 1000, 5000])
def test_blocks_may_cut_experts_anywhere(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a row, of a part of an expert, and of several; the files have several experts' tensors each."""
    theirs = write(CASES["qwen3_moe"], tmp_path / "theirs")
    write_characters(theirs)
    monkeypatch.setattr(converting, "BLOCK", block)
    converting.import_model(theirs, tmp_path / "ours")
    converting.export_model(tmp_path / "ours", tmp_path / "again", shard=20_000)
    assert same_bytes(stored(theirs), stored(tmp_path / "again"))


def test_import_and_export_tell_how_far_they_are(tmp_path: Path):
    seen: dict[str, list[tuple[int, int | None]]] = {}

    def progress(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        seen.setdefault(what, []).append((done, total))

    theirs, ours = write(SHARDED, tmp_path / "theirs"), tmp_path / "ours"
    converting.import_model(theirs, ours, progress)
    converting.export_model(ours, tmp_path / "again", progress=progress)
    size = sum(tensor.nbytes for tensor in stored(theirs).values())
    for what in ("importing", "exporting"):
        done, totals = zip(*seen[what], strict=True)
        assert len(done) > 3 and list(done) == sorted(done) and done[-1] == size and set(totals) == {size}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one message with which the tool ends, status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        convert_hf.main([str(each) for each in arguments])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("convert_hf.py: ") and "Traceback" not in said.err
    return said.err


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = stored(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def pickled(directory: Path, content: Any) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(content, directory / "pytorch_model.bin")


class Code:
    """Unpickled, it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch this_was_run",)


def drop_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def to_int8(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no directory": (
        shutil.rmtree,
        "be read: No such file or directory. Pass the directory of a model.",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "No weights found in",
    ),
    "config.json is a list": (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object"),
    "cut off": (truncate, "according to its header"),
    "a part without its index": (
        lambda d: (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors"),
        "but found only model-00001-of-00002.safetensors",
    ),
    "a pointer": (
        lambda d: (d / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "is a Git LFS pointer, not the weights. Run `git lfs pull`",
    ),
    "cut off in the header": (cut_header, "is not a safetensors file or is truncated (50 bytes)"),
    "wrong shape": (
        lambda d: edit(d / "config.json", intermediate_size=40),
        "mlp.gate_proj.weight has shape [56, 32], expected [40, 32]",
    ),
    "tensor missing": (lambda d: rewrite(d, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    "tensor too many": (
        lambda d: rewrite(d, lambda t: t.update(extra=torch.ones(2))),
        "extra is not a tensor of a llama model",
    ),
    "another constant of an activation": (
        lambda d: (
            shutil.rmtree(d),
            write(CASES["apertus, tied, biases"], d),
            rewrite(d, lambda t: t.update({"model.layers.1.mlp.act_fn.beta": torch.tensor(0.7)})),
        ),
        "model.layers.1.mlp.act_fn.beta is 0.7, but only 0.5 is supported",
    ),
    "head is not the embedding": (
        lambda d: rewrite(d, lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32)})),
        "lm_head.weight differs from the embedding, although config.json sets tie_word_embeddings",
    ),
    "quantized": (
        lambda d: edit(d / "config.json", quantization_config={"bits": 4}),
        "quantization_config = {'bits': 4} is not supported",
    ),
    "stored as int8": (
        lambda d: rewrite(d, to_int8),
        "model.norm.weight has unsupported type int8. Quantized weights are not supported",
    ),
    "family": (
        lambda d: edit(d / "config.json", model_type="mamba"),
        "model_type = 'mamba' is not supported. Legal values: llama",
    ),
    "unknown field": (lambda d: edit(d / "config.json", is_causal=False), "is_causal = False is not supported"),
    "heads do not divide": (
        lambda d: edit(d / "config.json", num_key_value_heads=3),
        "model.num_key_value_heads = 3 does not divide",
    ),
    "tokenizer too large": (
        lambda d: (d / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": VOCAB}}, "added_tokens": []})),
        f"has token id {VOCAB}, which is out of range for vocab_size={VOCAB}",
    ),
    "pickle with code": (
        lambda d: pickled(d, {"model.norm.weight": Code()}),
        "with weights_only=True",
    ),
    "pickle of something else": (lambda d: pickled(d, [1, 2]), "is not a state dict"),
    "pickle cut off": (
        lambda d: (pickled(d, {}), (d / "pytorch_model.bin").write_bytes(b"PK")),
        "with weights_only=True",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as it should be, with a tokenizer."""
    directory = write(LLAMA, tmp_path_factory.mktemp("whole") / "llama")
    write_characters(directory)
    return directory


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input_ends_with_one_message_and_leaves_nothing(name, whole, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shutil.copytree(whole, theirs)
    damage, says = BROKEN[name]
    damage(theirs)
    assert says in refusal(capsys, "import", theirs, ours)
    assert [path.name for path in tmp_path.iterdir() if path != theirs] == [], "nothing is written, and nothing was run"


def test_a_missing_or_unlisted_shard_is_named(tmp_path: Path, capsys):
    theirs = write(SHARDED, tmp_path / "theirs")
    index = theirs / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    more = listed["weight_map"] | {"model.other.weight": listed["weight_map"]["model.embed_tokens.weight"]}
    index.write_text(json.dumps(listed | {"weight_map": more}))
    assert "does not contain model.other.weight, although the index lists it" in refusal(
        capsys, "import", theirs, tmp_path / "ours"
    )
    index.write_text(json.dumps(listed | {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    assert "../elsewhere.safetensors is not a file name" in refusal(capsys, "import", theirs, tmp_path / "ours")
    index.write_text(json.dumps(listed))
    drop_shard(theirs)
    assert "No such file or directory. Check that the download is complete." in refusal(
        capsys, "import", theirs, tmp_path / "ours"
    )
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("failing", ["_store", "write_weights"])
def test_what_fails_half_way_leaves_nothing(failing, whole, tmp_path: Path, capsys, monkeypatch):
    def full(*arguments: Any) -> None:
        (arguments[0].parent if arguments[0].suffix == ".bin" else arguments[0]).joinpath("half").touch()
        raise OSError(28, "No space left on device")

    convert_hf.main(["import", str(whole), str(tmp_path / "first")])
    monkeypatch.setattr(converting, failing, full)
    command = ("import", whole) if failing == "_store" else ("export", tmp_path / "first")
    assert "No space left on device" in refusal(capsys, *command, tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_what_is_there_is_not_replaced(whole, tmp_path: Path, capsys):
    convert_hf.main(["import", str(whole), str(tmp_path / "ours")])
    assert "already exists" in refusal(capsys, "import", whole, tmp_path / "ours")
    assert "already exists" in refusal(capsys, "export", tmp_path / "ours", whole)
    assert "is not a checkpoint" in refusal(capsys, "export", whole, tmp_path / "out")


def test_torch_files_come_in_without_code_and_bare_models_without_their_prefix(tmp_path: Path):
    case = CASES["gpt2"]
    theirs = write(case._replace(shard="5GB"), tmp_path / "theirs")
    convert_hf.main(["import", str(theirs), str(tmp_path / "plain")])
    # as in the first published files
    bare = {name.removeprefix("transformer."): value for name, value in stored(theirs).items()}
    pickled(theirs, bare | {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)})
    convert_hf.main(["import", str(theirs), str(tmp_path / "bare")])
    one, other = (
        {name: tensor.chunks[0].crc32c for name, tensor in manifest_of(tmp_path / each).tensors.items()}
        for each in ("plain", "bare")
    )
    assert one == other


def test_files_that_do_not_align_their_data_come_in(whole, tmp_path: Path):
    theirs = tmp_path / "theirs"
    shutil.copytree(whole, theirs)
    path = theirs / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    convert_hf.main(["import", str(theirs), str(tmp_path / "ours")])
    convert_hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "out")])
    assert same_bytes(stored(tmp_path / "out"), stored(whole))


def test_what_lies_beside_the_weights_comes_along(whole, tmp_path: Path, capsys):
    ours, out = tmp_path / "ours", tmp_path / "out"
    whole = Path(shutil.copytree(whole, tmp_path / "whole"))
    edit(whole / "generation_config.json", eos_token_id=[2, 95])  # more than config.json names
    convert_hf.main(["import", str(whole), str(ours)])
    convert_hf.main(["export", str(ours), str(out)])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    before, after = (json.loads((each / "config.json").read_text()) for each in (whole, out))
    assert {key: before[key] for key in ("eos_token_id", "pad_token_id")} == {
        key: after[key] for key in ("eos_token_id", "pad_token_id")
    }
    (tmp_path / "large").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "large")
    (tmp_path / "large" / "added_tokens.json").write_text(json.dumps({"<x>": VOCAB}))
    assert "out of range for vocab_size" in refusal(
        capsys, "export", ours, tmp_path / "other", "--like", tmp_path / "large"
    )
    assert not (tmp_path / "other").exists()


def test_another_dtype_is_written_where_it_is_asked_for(whole, tmp_path: Path):
    convert_hf.main(["import", str(whole), str(tmp_path / "ours")])
    convert_hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    rounded = {name: value.bfloat16() for name, value in stored(whole).items()}
    assert same_bytes(stored(tmp_path / "out"), rounded)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_missing_weights_of_an_indexer_are_named(tmp_path: Path, capsys):
    theirs, name = tmp_path / "theirs", "model.layers.2.self_attn.indexer.wk.weight"
    write(CASES["glm_moe_dsa"]._replace(shard="5GB"), theirs)
    rewrite(theirs, lambda tensors: tensors.pop(name))
    assert name in refusal(capsys, "import", theirs, tmp_path / "ours")


@pytest.mark.parametrize(
    "name",
    ["deepseek_v2, lite, yarn rope", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "kimi_linear"],
)
def test_routers_that_transformers_keeps_in_fp32_are_not_rounded(name, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    theirs, ours, out = write(CASES[name], tmp_path / "theirs"), tmp_path / "ours", tmp_path / "out"
    convert_hf.main(["import", str(theirs), str(ours)])
    convert_hf.main(["export", str(ours), str(out), "--dtype", "bfloat16"])
    model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.bfloat16)
    save(model, CASES[name]._replace(shard="5GB"), tmp_path / "expected")
    got, expected = stored(out), stored(tmp_path / "expected")
    for key in [key for key in got if "weights_proj" in key]:  # transformers rounds those of indexers to bf16, not fp16
        assert torch.equal(got.pop(key), stored(theirs)[key]) and expected.pop(key).dtype == torch.bfloat16
    assert same_bytes(got, expected)
    assert stored_dtype(hf_config(out)) == "bfloat16"


def test_check_tells_equal_from_different_position_by_position(whole, tmp_path: Path, capsys):
    ours, other = tmp_path / "ours", tmp_path / "other"
    convert_hf.main(["import", str(whole), str(ours)])
    capsys.readouterr()
    assert convert_hf.main(["check", str(ours), str(whole), "--text", "hello world", "--tokens", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] and [len(each["worst"]) for each in report["inputs"]] == [20, len("hello world")]
    assert 0 < max(each["maximum"] for each in report["inputs"]) <= 1e-4
    shutil.copytree(whole, other)

    def shift(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] += 1

    rewrite(other, shift)
    assert convert_hf.main(["check", str(ours), str(other), "--tokens", "20", "--json"]) == 1
    worst = json.loads(capsys.readouterr().out)["inputs"][0]["worst"]
    assert worst[0] <= 1e-4 < max(worst[1:]), "a query changes nothing where there is one key to look at"
    assert convert_hf.main(["check", str(ours), str(other), "--tokens", "20"]) == 1
    assert capsys.readouterr().out.splitlines()[-2] == "NOT equal within 0.0001"
    rounded = tmp_path / "rounded"
    convert_hf.main(["export", str(ours), str(rounded), "--dtype", "bfloat16"])
    content = json.loads((rounded / "config.json").read_text())
    # as transformers 5 writes it
    (rounded / "config.json").write_text(json.dumps(content | {"dtype": content.pop("torch_dtype")}))
    assert convert_hf.main(["check", str(ours), str(rounded), "--tokens", "20"]) == 1
    assert "Export the checkpoint with --dtype float32" in capsys.readouterr().out.splitlines()[-1]
