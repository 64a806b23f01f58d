"""Which files of a directory are the model: those that transformers and PEFT load. Weights that are not finite are
rejected by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.commands import convert as convert_hf
from megalite.commands.train import ignored_fields
from megalite.config.load import from_dict
from megalite.families.model_config import hf_config, hf_shape
from megalite.huggingface.convert import import_model
from megalite.huggingface.files import ConversionError
from megalite.huggingface.initial_weights import starting_weights
from megalite.huggingface.source import HuggingFaceSource
from megalite.parallel.spec import Rectangle
from tests.huggingface.hf_models import CASES, load, write

WHOLE, INDEX, TORCH = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LLAMA, GPT2 = CASES["llama, one key-value head"]._replace(shard="5GB"), CASES["gpt2"]._replace(shard="5GB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file."""
    return write(LLAMA, tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def theirs(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "theirs"))


def other(directory: Path) -> dict[str, Tensor]:
    """Weights of the same shapes that compute something else."""
    return {name: value + 0.1 for name, value in load_file(directory / WHOLE).items()}


def shards(directory: Path, tensors: dict[str, Tensor], torch_format: bool = False) -> None:
    """Write tensors as two files and their index."""
    ending, base = ("bin", "pytorch_model") if torch_format else ("safetensors", "model")
    files = [f"{base}-{number:05d}-of-00002.{ending}" for number in (1, 2)]
    places = {name: files[at % 2] for at, name in enumerate(tensors)}
    for file in files:
        own = {name: value for name, value in tensors.items() if places[name] == file}
        torch.save(own, directory / file) if torch_format else save_file(own, directory / file, {"format": "pt"})
    (directory / f"{base}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def stale_shards(directory: Path) -> None:
    shards(directory, other(directory))


def index_without_shards(directory: Path) -> None:
    stale_shards(directory)
    for path in directory.glob("model-*"):
        path.unlink()


def shards_and_torch(directory: Path) -> None:
    torch.save(other(directory), directory / TORCH)
    shards(directory, load_file(directory / WHOLE))
    (directory / WHOLE).unlink()


def torch_and_its_shards(directory: Path) -> None:
    torch.save(load_file(directory / WHOLE), directory / TORCH)
    shards(directory, other(directory), torch_format=True)
    (directory / WHOLE).unlink()


def index_of_another_file(directory: Path) -> None:
    """The index names for a tensor the file that does not have it."""
    shards(directory, load_file(directory / WHOLE))
    (directory / WHOLE).unlink()
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    (directory / INDEX).write_text(json.dumps(content))


def a_tensor_in_two_files(directory: Path) -> None:
    shards(directory, load_file(directory / WHOLE))
    (directory / WHOLE).unlink()
    last = directory / "model-00002-of-00002.safetensors"
    save_file(load_file(last) | {"model.norm.weight": torch.full((32,), 3.0)}, last, {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        stale_shards,
        index_without_shards,
        shards_and_torch,
        torch_and_its_shards,
        index_of_another_file,
        a_tensor_in_two_files,
    ],
)
def test_the_weights_are_those_that_transformers_loads(change: Callable[[Path], None], theirs: Path):
    change(theirs)
    source, expected = HuggingFaceSource.of(theirs), load(theirs).state_dict()
    assert all(torch.equal(source.weights[name], value) for name, value in expected.items())


def test_files_that_are_not_read_are_told(theirs: Path, tmp_path: Path):
    stale_shards(theirs)
    result = import_model(theirs, tmp_path / "ours")
    assert result["notes"] == [f"not read beside {WHOLE}, as in transformers: {INDEX}"]


def test_the_number_of_mtp_modules_is_that_of_the_file_that_is_read(tmp_path: Path):
    """An index of a model with such modules beside a file without them."""
    theirs = write(CASES["deepseek_v3"]._replace(shard="5GB"), tmp_path / "theirs")
    config = hf_config(theirs) | {"num_nextn_predict_layers": 1}
    (theirs / "config.json").write_text(json.dumps(config))
    ahead = f"model.layers.{config['num_hidden_layers']}.enorm.weight"
    (theirs / INDEX).write_text(json.dumps({"weight_map": {ahead: "model-00001-of-00001.safetensors"}}))
    assert hf_shape(str(theirs))["mtp_layers"] == 0


def test_fields_that_are_ignored_are_told(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (theirs / "config.json").write_text(
        json.dumps(hf_config(theirs) | {"unsloth_version": "2026.4", "pretraining_tp": 2})
    )
    assert convert_hf.main(["import", str(theirs), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert (
        "ignored, as transformers does not read them in a llama model: pretraining_tp = 2, unsloth_version = 2026.4\n"
        in said
    )
    config = from_dict({"model": hf_shape(str(theirs)) | {"from_hf": str(theirs)}})
    assert ignored_fields(config) == [said.splitlines()[-1]], "also at the start of a run"
    shutil.rmtree(theirs)
    assert ignored_fields(config) == [], "a resumed run needs the directory no more"


# ---- an adapter beside the weights


def test_weights_to_which_transformers_adds_an_adapter_are_rejected(theirs: Path, tmp_path: Path):
    (theirs / "adapter_config.json").write_text("{}")
    with pytest.raises(ConversionError, match="next to the weights"):
        import_model(theirs, tmp_path / "ours")
    with pytest.raises(ConversionError, match="next to the weights"):
        read_all(theirs)


# ---- values that are not finite


def read_all(directory: Path) -> None:
    """Read a model as one rank of a run that starts from it."""
    source = HuggingFaceSource.of(directory)
    read = starting_weights(_started(source, directory))
    assert read is not None
    names = {
        name: (len(place.rows), *(place.shape[1:] if not place.transposed else place.shape[:1]))
        for name, place in source.places.items()
    }
    read([Rectangle(f"weight/{name}", shape, (0,) * len(shape), torch.empty(shape)) for name, shape in names.items()])


def _started(source: HuggingFaceSource, directory: Path):
    source.model.init_from = f"hf:{directory}"
    return source.model


def spoil(directory: Path, **values: tuple[int, float]) -> None:
    """Set some values of tensors. values: name, with _ for dots → how many, and what."""
    tensors = load_file(directory / WHOLE)
    for name, tensor in tensors.items():
        if (key := name.replace(".", "_")) in values:
            number, value = values[key]
            tensor.view(-1)[:number] = value
    save_file(tensors, directory / WHOLE, {"format": "pt"})


@pytest.mark.parametrize(
    "reader",
    [read_all, lambda directory: import_model(directory, directory.with_name("ours"))],
    ids=["start", "import"],
)
def test_weights_that_are_not_finite_are_rejected_by_name_and_number(reader: Callable[[Path], None], theirs: Path):
    spoil(theirs, model_norm_weight=(2, float("nan")), model_layers_1_mlp_down_proj_weight=(3, float("-inf")))
    with pytest.raises(CheckpointError) as rejected:
        reader(theirs)
    said = str(rejected.value)
    assert f"{theirs} contains NaN or infinite values" in said and "model.norm.weight: 2\n" in said
    assert "model.layers.1.mlp.down_proj.weight: 3\n" in said and "Use an earlier checkpoint" in said
    assert not theirs.with_name("ours").exists()


def test_large_finite_weights_come_in(theirs: Path, tmp_path: Path):
    """Any sum of them overflows."""
    spoil(theirs, model_norm_weight=(32, 3e38))
    assert import_model(theirs, tmp_path / "ours")["notes"] == []


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt2", "gpt_oss"])
def test_a_value_in_a_fused_transposed_or_expert_tensor_is_found(case: str, tmp_path: Path):
    theirs = write(CASES[case]._replace(shard="5GB"), tmp_path / "theirs")
    name = next(name for name in load_file(theirs / WHOLE) if "experts" in name or "c_attn.weight" in name)
    spoil(theirs, **{name.replace(".", "_"): (1, float("inf"))})
    with pytest.raises(CheckpointError, match=f"{name}: 1\n"):
        import_model(theirs, tmp_path / "ours")
