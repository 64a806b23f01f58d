"""Files in fp8 with a scale for each block of 128 x 128: what comes in is DeepSeek's formula, and what transformers
reads."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.families.model_config import from_hf_config, hf_config
from megalite.huggingface import convert as converting
from megalite.huggingface import fp8
from megalite.huggingface.files import ConversionError
from megalite.huggingface.source import HuggingFaceSource
from tests.huggingface.hf_models import CASES, make

QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
UNEVEN = {"hidden_size": 160, "intermediate_size": 264, "moe_intermediate_size": 136, "num_hidden_layers": 2}
EVEN = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
MATRIX = "model.layers.0.mlp.up_proj.weight"


def random_codes(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A matrix of any fp8 numbers but NaN, and scales of its blocks."""
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    return codes.view(torch.float8_e4m3fn), torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-4


def exact(codes: Tensor, scales: Tensor) -> Tensor:
    """DeepSeek's weight_dequant in float64: each number times the scale of its block."""
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return codes.double() * scales.double()[rows][:, columns]


def write(directory: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """A DeepSeek-V3 in fp8, its matrices but those of routers; returns what its tensors are in bf16."""
    torch.manual_seed(0)
    case = CASES["deepseek_v3"]
    model = make(case._replace(fields=case.fields | fields, dtype=torch.bfloat16))
    model.save_pretrained(directory)
    expected = load_file(directory / "model.safetensors")
    tensors = dict(expected)
    for name, value in expected.items():
        if ".layers." in name and value.dim() == 2 and not name.endswith("mlp.gate.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = random_codes(*value.shape)
            expected[name] = exact(tensors[name], tensors[f"{name}_scale_inv"]).float().bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def test_an_import_is_deepseeks_conversion_and_holds_few_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that 128 does not divide; blocks of rows that cut matrices and experts."""
    expected, alive, most = write(tmp_path / "theirs", UNEVEN), weakref.WeakSet[Tensor](), 0
    dequantized = fp8.dequantized

    def counted(weight: Tensor, scales: Tensor) -> Tensor:
        nonlocal most
        matrix = dequantized(weight, scales)
        alive.add(matrix)
        most = max(most, len(alive))
        return matrix

    monkeypatch.setattr(fp8, "dequantized", counted)
    monkeypatch.setattr(converting, "BLOCK", 20_000)
    converting.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert 0 < most <= 4
    converting.export_model(tmp_path / "ours", tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value), name
    assert "quantization_config" not in hf_config(tmp_path / "out")


def test_a_part_is_read_as_of_the_whole(tmp_path: Path) -> None:
    """What a rank reads that starts from such a directory: rows of several experts, and rotated channels in another
    order."""
    write(tmp_path, UNEVEN)
    source = HuggingFaceSource.of(tmp_path)
    for name in ("layers.1.mlp.experts.in.weight", "layers.0.attention.kv_a.weight"):
        shape = (len(source.places[name].rows), source.places[name].shape[1])
        whole = source.read(name, (0, 0), shape)
        first, count = shape[0] // 3, shape[0] // 2
        assert torch.equal(source.read(name, (first, 3), (count, 140)), whole[first : first + count, 3:143])


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Without a GPU it dequantizes; sizes that 128 divides, or below it: it does not find the blocks of others."""
    from transformers import AutoModelForCausalLM

    write(tmp_path / "theirs", EVEN)
    converting.import_model(tmp_path / "theirs", tmp_path / "ours")
    converting.export_model(tmp_path / "ours", tmp_path / "out")
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.bfloat16, device_map="cpu").state_dict()
        for each in ("theirs", "out")
    )
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3, tied"])
def test_an_export_in_fp8_is_read_by_transformers_and_here(name: str, tmp_path: Path) -> None:
    """Matrices of which 128 divides both sizes, in several files; others, such as latents and gates, stay in bf16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    case = CASES[name]
    even = {field: value for field, value in EVEN.items() if name == "deepseek_v3" or not field.startswith("moe")}
    make(case._replace(fields=case.fields | even, dtype=torch.bfloat16)).save_pretrained(tmp_path / "theirs")
    converting.import_model(tmp_path / "theirs", tmp_path / "ours")
    converting.export_model(tmp_path / "ours", tmp_path / "plain", dtype=torch.bfloat16)
    converting.export_model(tmp_path / "ours", tmp_path / "fp8", dtype="fp8", shard=300_000)
    plain = load_file(tmp_path / "plain/model.safetensors")
    files = [load_file(file) for file in sorted((tmp_path / "fp8").glob("*.safetensors"))]
    tensors = {name: value for file in files for name, value in file.items()}
    quantized = {name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn}
    assert len(files) > 1 and any(".up_proj." in name for name in quantized)
    assert not any(part in name for name in quantized for part in ("embed", "lm_head", "norm", "mlp.gate."))
    assert all(size % 128 == 0 for name in quantized for size in plain[name].shape)
    for name in quantized:
        own = exact(tensors[name], tensors[f"{name}_scale_inv"])
        error = (own - plain[name].double()).abs()
        assert (error <= plain[name].double().abs() * 2**-4 + tensors[f"{name}_scale_inv"].max() * 2**-10).all()
        plain[name] = own.float().bfloat16()
    converting.import_model(tmp_path / "fp8", tmp_path / "again")
    converting.export_model(tmp_path / "again", tmp_path / "out")
    again = load_file(tmp_path / "out/model.safetensors")
    assert again.keys() == plain.keys() and all(torch.equal(again[name], value) for name, value in plain.items())
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.bfloat16, device_map="cpu").state_dict()
        for each in ("fp8", "out")
    )
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_every_number_and_scales_in_each_type(dtype: torch.dtype) -> None:
    """Half a unit in the last of the 8 places of bf16, from float64."""
    codes, scales = random_codes(300, 200)
    assert len(codes.view(torch.uint8).unique()) == 254
    scales = scales.to(dtype)
    wanted = exact(codes, scales.float())
    dequantized = fp8.dequantized(codes, scales).double()
    assert ((dequantized - wanted).abs() <= wanted.abs() * 2**-8 * (1 + 1e-4)).all()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "static activations": (
        {"activation_scheme": "static"},
        "activation_scheme = 'static' is not supported. Legal values: 'dynamic'.",
    ),
    "other blocks": (
        {"weight_block_size": [64, 64]},
        "weight_block_size = [64, 64] is not supported. Legal values: [128, 128].",
    ),
    "a scale for each tensor": (
        {"weight_block_size": None},
        "weight_block_size = None is not supported. Legal values: [128, 128].",
    ),
    "another format": ({"fmt": "e5m2"}, "fmt = 'e5m2' is not supported. Legal values: 'e4m3'."),
    "another method": ({"quant_method": "awq"}, "quant_method = 'awq' is not supported. Legal values: 'fp8'."),
    "an unknown field": ({"bits": 8}, "bits = 8 is not supported."),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_another_quantization_is_refused_by_its_field(name: str) -> None:
    change, says = CONFIGS[name]
    plain = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    given = QUANTIZATION | {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    assert from_hf_config(plain | {"quantization_config": given}) == from_hf_config(plain)
    with pytest.raises(ConfigError) as refused:
        from_hf_config(plain | {"quantization_config": given | change})
    assert f"config.json: quantization_config.{says}" in str(refused.value)


FILES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": (lambda t: t.pop(f"{MATRIX}_scale_inv"), f"{MATRIX}_scale_inv is missing"),
    "no matrix": (lambda t: t.pop(MATRIX), f"{MATRIX} is missing"),
    "one scale": (
        lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(())}),
        f"{MATRIX}_scale_inv has shape [], expected [2, 1] for {MATRIX} [256, 128]",
    ),
    "scales of a matrix in bf16": (
        lambda t: t.update({MATRIX: torch.ones(256, 128).bfloat16()}),
        f"{MATRIX} has type torch.bfloat16",
    ),
    "scales in bytes": (
        lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}),
        "scales of type torch.uint8",
    ),
    "a scale that is no number": (
        lambda t: t[f"{MATRIX}_scale_inv"].fill_(torch.nan),
        f"{MATRIX}_scale_inv contains a negative or NaN scale",
    ),
    "a NaN": (lambda t: t[MATRIX].view(torch.uint8)[7, 5:6].fill_(0xFF), f"{MATRIX} contains NaN"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    write(directory, EVEN)
    return directory


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_by_name(name: str, whole: Path, tmp_path: Path) -> None:
    damage, says = FILES[name]
    tensors = {key: value.clone() for key, value in load_file(whole / "model.safetensors").items()}
    damage(tensors)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file(tensors, theirs / "model.safetensors")
    (theirs / "config.json").write_text((whole / "config.json").read_text())
    with pytest.raises(ConversionError) as refused:
        converting.import_model(theirs, tmp_path / "ours")
    assert says in str(refused.value) and not (tmp_path / "ours").exists()
