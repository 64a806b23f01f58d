"""QLoRA against PEFT over bitsandbytes: one step, the adapter alone and merged, and a run that resumes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megalite_kernels import block_formats
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.assembly.parts import make_mesh
from megalite.checkpoint import CheckpointError
from megalite.commands import checkpoint, convert, evaluate, generate, score
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.evaluation.logits import load_stage, our_logits
from megalite.families.model_config import hf_shape
from megalite.generation.sources import open_source
from megalite.huggingface.files import ConversionError
from megalite.huggingface.source import HuggingFaceSource
from megalite.parallel.quantized import layout
from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.parallel.spec import Rectangle
from megalite.training import checkpointing
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.huggingface.hf_models import CASES, VOCAB, Case, logits_of, random_ids, write
from tests.support import jobs_quantized
from tests.support.bits_and_bytes import by_bitsandbytes, by_others, in_fp32
from tests.support.configs import write_tokens
from tests.support.preferences import write_preferences

SEQUENCE, BATCH, LR, DECAY, EPS = 24, 4, 1e-3, 0.1, 1e-8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Rows of whole blocks: bitsandbytes' route for AVX-512 is wrong for others."""
MATRIX, OURS = "model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up.weight"
MODELS = {
    "llama": Case("Llama", CASES["llama, one key-value head"].fields | SIZES),
    "phi3": Case("Phi3", CASES["phi3"].fields | SIZES | {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: write(case, place / name) for name, case in MODELS.items()}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=2000)


def trainer_of(
    directory: Path,
    prefix: str,
    place: Path,
    load: str = "none",
    weights: str | None = None,
    precision: str = "fp32",
    train: dict[str, Any] | None = None,
    **lora: Any,
) -> Trainer:
    config = from_dict(
        {
            "run": {"dir": str(place), "name": "run"},
            "model": hf_shape(str(directory)) | {"init_from": weights or f"hf:{directory}", "from_hf": str(directory)},
            "lora": ({"rank": 4, "alpha": 6.0, "base": "nf4"} | lora) if lora.get("rank") != 0 else {},
            "parallel": {"dp": 1},
            "data": {"train": prefix, "validation": 0.25, "sequence_length": SEQUENCE, "shuffle": False},
            "train": {
                "steps": 4,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "grad_clip": 0.0,
                "precision": precision,
            }
            | (train or {}),
            "optimizer": {"lr": LR, "decay": "constant", "weight_decay": DECAY, "eps": EPS},
            "checkpoint": {"load": load},
        }
    )
    return Trainer(config, make_mesh(config))


@pytest.mark.parametrize(
    ("base", "double", "dora"),
    [("nf4", False, False), ("nf4", True, True), ("fp4", True, False), ("int8", False, True)],
)
def test_one_step_is_one_step_of_peft(base, double, dora, models, prefix, tmp_path: Path):
    import peft

    start = tmp_path / "start"
    options = {"base": base, "double_quant": double, "dora": dora}
    first = trainer_of(models["llama"], prefix, tmp_path / "first", **options)
    first.step()  # B is not zero
    assert convert.main(["adapter-export", str(first.save()), str(start)]) == 0
    first.close()
    model = peft.PeftModel.from_pretrained(by_bitsandbytes(models["llama"], double, base), start, is_trainable=True)
    model.train()  # in eight bits only then with inputs that are not quantized
    trainer = trainer_of(models["llama"], prefix, tmp_path, **options, init_from=str(start))
    result = trainer.step()
    saved = trainer.save()
    trainer.close()
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    logits = model(input_ids=tokens[:-1].view(BATCH, SEQUENCE), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    decayed = [value for key, value in trained.items() if "magnitude" not in key]
    others = [value for key, value in trained.items() if "magnitude" in key]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=EPS).step()
    assert convert.main(["adapter-export", str(saved), str(tmp_path / "out")]) == 0
    ours, wanted = peft.load_peft_weights(str(tmp_path / "out"), device="cpu"), peft.get_peft_model_state_dict(model)
    assert wanted.keys() == ours.keys()
    for key, value in wanted.items():
        assert (ours[key] - value).abs().max() <= 1e-5, key


@pytest.mark.parametrize(("name", "double"), [("phi3", False), ("llama", True)])
def test_resumes_bitwise_without_a_base_in_its_checkpoint_and_merges_with_what_it_was_trained_on(
    name, double, models, prefix, tmp_path: Path
):
    """Also a fused projection, of which a row of blocks has the codes of the same row in the file."""
    lora = {"double_quant": double}
    trainer = trainer_of(models[name], prefix, tmp_path, **lora)
    trainer.step(), trainer.step()
    saved = trainer.save()
    expected = [trainer.step().loss for _ in range(2)]
    trainer.close()
    again = trainer_of(models[name], prefix, tmp_path, str(saved), **lora)
    assert [again.step().loss for _ in range(2)] == expected
    again.close()
    ids = random_ids(tokens=SEQUENCE)
    ours = our_logits(load_stage(open_source(saved)), ids)
    assert convert.main(["adapter-export", str(saved), str(tmp_path / "adapter")]) == 0
    assert (quantized_logits(models[name], tmp_path / "adapter", double, ids) - ours).abs().max() <= 1e-4
    with pytest.raises(CheckpointError, match=f"not the base. Set model.init_from to .* hf:{models[name]}"):
        trainer_of(models[name], prefix, tmp_path / "on it", weights=str(saved), init_from=str(tmp_path / "adapter"))
    assert convert.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    assert (logits_of(tmp_path / "merged", ids) - ours).abs().max() <= 1e-4


def quantized_logits(directory: Path, adapter: Path, double: bool, ids: Tensor) -> Tensor:
    from peft import PeftModel

    model = PeftModel.from_pretrained(by_bitsandbytes(directory, double), adapter).eval()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(("base", "precision", "width"), [("nf4", "bf16", 128), ("mxfp4", "fp32", 100)])
def test_lengths_of_rows_are_those_of_the_base(base, precision, width, prefix, tmp_path: Path):
    """In another precision than the file's, and where a matrix has no whole blocks."""
    directory = write(Case("Llama", MODELS["llama"].fields | {"intermediate_size": width}), tmp_path / "model")
    lora = {"base": base, "dora": True}
    trainer = trainer_of(directory, prefix, tmp_path, precision=precision, **lora)
    trainer.step(), trainer.step()
    assert convert.main(["adapter-export", str(trainer.save()), str(tmp_path / "adapter")]) == 0
    trained = global_tensors(trainer)
    trainer.close()
    adapter = str(tmp_path / "adapter")
    again = trainer_of(directory, prefix, tmp_path / "again", precision=precision, init_from=adapter, **lora)
    for name, value in global_tensors(again).items():
        if name.endswith("magnitude"):
            assert (value - trained[name]).abs().max() <= 1e-6, name
    again.close()


def test_adapters_start_at_what_quantization_has_lost(models, prefix, tmp_path: Path):
    """A and B of PEFT's decomposition of the same matrix, up to the sign of singular vectors."""
    from peft.utils.loftq_utils import _low_rank_decomposition

    lora = {"start": "loftq", "double_quant": True, "alpha": 6.0}
    trainer = trainer_of(models["llama"], prefix, tmp_path, **lora)
    ours = global_tensors(trainer)
    first = trainer.step().loss
    saved = trainer.save()
    trainer.close()
    matrix = load_file(models["llama"] / "model.safetensors")[MATRIX]
    residual = matrix - block_formats.rounded(matrix, "nf4", 64, double=True)
    theirs = _low_rank_decomposition(residual, 4)
    a, b = (ours[f"weight/{OURS.removesuffix('weight')}lora_{half}"] for half in "ab")
    assert (6.0 / 4 * b @ a - theirs["L"] @ theirs["R"]).abs().max() <= 1e-5
    assert (residual - 6.0 / 4 * b @ a).norm() < 0.95 * residual.norm()
    plain = trainer_of(models["llama"], prefix, tmp_path / "plain", double_quant=True)
    assert plain.step().loss != first
    plain.close()
    again = trainer_of(models["llama"], prefix, tmp_path, str(saved), **lora)
    resumed = global_tensors(again)
    again.close()
    assert not torch.equal(resumed[f"weight/{OURS.removesuffix('weight')}lora_a"], a), "trained, not started again"


def test_adapters_of_a_matrix_that_is_not_quantized_start_as_without_it(prefix, tmp_path: Path):
    directory = write(Case("Llama", MODELS["llama"].fields | {"intermediate_size": 100}), tmp_path / "model")
    trainer = trainer_of(directory, prefix, tmp_path, base="mxfp4", start="loftq")
    ours = global_tensors(trainer)
    trainer.close()
    assert ours["weight/layers.0.mlp.up.lora_b"].any() and ours["weight/layers.0.mlp.down.lora_a"].any()
    assert not ours["weight/layers.0.mlp.down.lora_b"].any()


def test_adapters_of_a_matrix_that_loses_nothing_can_be_trained(saved, prefix, tmp_path: Path):
    trainer = trainer_of(saved["nf4", True], prefix, tmp_path, start="loftq", double_quant=True)
    assert trainer.step().grad_norm > 0
    assert global_tensors(trainer)["weight/layers.0.mlp.up.lora_b"].any()
    trainer.close()


def test_each_expert_starts_at_what_quantization_has_lost(prefix, tmp_path: Path):
    """PEFT decomposes no experts: its decomposition of each of them."""
    from peft.utils.loftq_utils import _low_rank_decomposition

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_local_experts": 3}
    directory = write(Case("Mixtral", CASES["mixtral"].fields | shape), tmp_path / "model")
    targets = ["experts.in", "experts.down"]
    trainer = trainer_of(directory, prefix, tmp_path, start="loftq", double_quant=True, targets=targets)
    ours = global_tensors(trainer)
    trainer.close()
    tensors = load_file(directory / "model.safetensors")
    for part, theirs in (("in", ("w1", "w3")), ("down", ("w2",))):
        parts = [
            [f"layers.0.block_sparse_moe.experts.{expert}.{each}.weight" for each in theirs] for expert in range(3)
        ]
        stacked = torch.stack([torch.cat([tensors[f"model.{each}"] for each in own]) for own in parts])
        lost = stacked - by_others(stacked.flatten(0, 1), "nf4", True).view_as(stacked)
        a, b = (ours[f"weight/layers.0.mlp.experts.{part}.lora_{half}"] for half in "ab")
        for own_a, own_b, rest in zip(a.chunk(3), b.chunk(3), lost, strict=True):
            best = _low_rank_decomposition(rest, 4)
            assert (6.0 / 4 * own_b @ own_a - best["L"] @ best["R"]).abs().max() <= 1e-5, part


class WithoutGpu(TorchFunctionMode):
    """Moves tensors to the CPU that are to be moved to a GPU, on which PEFT decomposes matrices."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            return "cpu" if str(value) == "cuda" else value

        given = {name: here(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.to:
            args = args[0], *map(here, args[1:])
        return function(*args, **given)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_base_and_adapters_are_found_together(name, models, prefix, tmp_path: Path, capsys):
    """Values and adapters of PEFT's three iterations, and the model of PEFT over these files."""
    import peft
    import transformers
    from peft.utils.loftq_utils import loftq_init

    words = ["loftq", str(models[name]), str(tmp_path / "start"), "--rank", "4", "--alpha", "6", "--json"]
    assert convert.main([*words, "--iterations", "3"]) == 0
    said = json.loads(capsys.readouterr().out)
    base, adapter = Path(said["base"]), Path(said["adapter"])
    matrices, halves = load_file(models[name] / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    files = HuggingFaceSource.of(base).weights
    squares = torch.zeros(2)
    adapted = [key for key in matrices if "_proj." in key]
    for theirs in adapted:
        with WithoutGpu():
            values, a, b = loftq_init(matrices[theirs], 4, 4, 3)
        module = f"base_model.model.{theirs.removesuffix('.weight')}"
        product = 6.0 / 4 * halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]
        assert (files[theirs] - values).abs().max() <= 1e-6 and (product - b @ a).abs().max() <= 1e-5, theirs
        left = (matrices[theirs] - values - b @ a).square().sum()
        squares += torch.stack([left, matrices[theirs].square().sum()])
    assert len(halves) == 2 * len(adapted) and said["left"] < said["lost"]
    assert said["left"] == pytest.approx((squares[0] / squares[1]).item() ** 0.5, rel=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    in_fp32(model)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    logits = model(input_ids=tokens[:-1].view(BATCH, SEQUENCE), use_cache=False).logits
    trainer = trainer_of(base, prefix, tmp_path, init_from=str(adapter))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    assert trainer.step().loss == pytest.approx(loss, rel=1e-5)
    trainer.close()
    for directory, rank, message in (
        (base, 4, "is quantized: what this has lost is not in it"),
        (models[name], 65, "the rank 65 of adapters is more than"),
    ):
        with pytest.raises(SystemExit):
            convert.main(["loftq", str(directory), str(tmp_path / "again"), "--rank", str(rank)])
        assert message in capsys.readouterr().err and not (tmp_path / "again").exists()


FORMS = [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False)]
"""Of a base, and whether its scales are quantized."""


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The model as transformers saves it in few bits."""
    place = tmp_path_factory.mktemp("quantized")
    for base, double in FORMS:
        by_bitsandbytes(models["llama"], double, base).save_pretrained(place / f"{base} {double}")
    return {(base, double): place / f"{base} {double}" for base, double in FORMS}


def bytes_of_base(trainer: Trainer) -> list[Tensor]:
    """Codes and scales, as they are in memory."""
    buckets = (bucket.codes for bucket in trainer.store.buckets)
    return [codes.kept for codes in buckets if isinstance(codes, QuantizedBuffers)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_directory_in_few_bits_is_read_and_has_the_same_codes_again(form, models, saved, prefix, tmp_path: Path):
    base, double = form
    ids = random_ids(tokens=SEQUENCE)
    model = by_bitsandbytes(models["llama"], double, base)
    model.train()  # in eight bits only then with inputs that are not quantized
    wanted = model(input_ids=ids, use_cache=False).logits.detach()
    assert (our_logits(load_stage(open_source(f"hf:{saved[form]}")), ids) - wanted).abs().max() <= 1e-5
    first, again = (
        trainer_of(directory, prefix, tmp_path / str(number), base=base, double_quant=double)
        for number, directory in enumerate((models["llama"], saved[form]))
    )
    for ours, theirs in zip(bytes_of_base(first), bytes_of_base(again), strict=True):
        if base == "fp4":  # which has two zeros
            ours, theirs = (each & torch.where(each & 15 == 8, 0xF0, 0xFF) for each in (ours, theirs))
            ours, theirs = (each & torch.where(each >> 4 == 8, 0x0F, 0xFF) for each in (ours, theirs))
        assert len(ours) > 4096 and torch.equal(ours, theirs)
    assert [first.step().loss for _ in range(2)] == [again.step().loss for _ in range(2)]
    first.close(), again.close()


BATCHES = {"global_batch_size": 2, "micro_batch_size": 1}
NAMES = {"attention.q": "self_attn.q_proj", "attention.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}


@pytest.mark.ranks
@pytest.mark.parametrize("form", [("fp4", True), ("int8", False)])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_directory_in_few_bits_has_its_values_on_every_rank(layout, form, models, saved, prefix, ranks):
    matrices = load_file(models["llama"] / "model.safetensors")
    model = hf_shape(str(models["llama"])) | {"init_from": f"hf:{saved[form]}"}
    lora = {"rank": 4, "base": form[0], "double_quant": form[1]}
    data = {"train": prefix, "sequence_length": SEQUENCE}
    config = {"model": model, "lora": lora, "parallel": layout, "data": data, "train": BATCHES}
    seen = 0
    for values in ranks.run(2, jobs_quantized.values, config):
        for layer in range(model["num_hidden_layers"]):
            for ours, theirs in NAMES.items():
                (row, column), own = values[f"layers.{layer}.{ours}.weight"]
                whole = by_others(matrices[f"model.layers.{layer}.{theirs}.weight"], *form)
                seen += own.numel()
                assert torch.equal(own, whole[row : row + own.shape[0], column : column + own.shape[1]]), ours
    assert seen > 0


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nf4, rsLoRA, preferences, recomputed": (
        {"base": "nf4", "double_quant": True, "scaling": "rslora"},
        {"objective": "dpo", "recompute": "full"},
    ),
    "fp4, DoRA, saved modules, preferences": (
        {"base": "fp4", "dora": True, "modules_to_save": ["embedding", "head", "norms"]},
        {"objective": "dpo"},
    ),
    "int8, rsLoRA, DoRA, saved modules, preferences, recomputed": (
        {"base": "int8", "scaling": "rslora", "dora": True, "modules_to_save": ["norms"]},
        {"objective": "dpo", "recompute": "selective"},
    ),
    "mxfp4, DoRA, preferences, recomputed": (
        {"base": "mxfp4", "dora": True},
        {"objective": "orpo", "recompute": "full"},
    ),
}
"""Options of adapters and of training, over each form of a base."""


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_that_over_the_values_of_its_base(run, tmp_path: Path, capsys):
    """The values are those of others, in a directory in fp32. Also what the run then generates."""
    lora, train = RUNS[run]
    fields = MODELS["llama"].fields | {"vocab_size": 260, "num_hidden_layers": 2}
    directory = write(Case("Llama", fields), tmp_path / "model")
    values = Path(shutil.copytree(directory, tmp_path / "values"))
    tensors = load_file(directory / "model.safetensors")
    for name in (name for name in tensors if "_proj." in name):
        tensors[name] = by_others(tensors[name], lora["base"], lora.get("double_quant", False)).contiguous()
    save_file(tensors, values / "model.safetensors", {"format": "pt"})
    data = write_preferences(tmp_path / "data", [(3, 4, 5), (2, 6, 3), (5, 2, 2), (4, 4, 7), (3, 3, 3), (1, 5, 2)] * 2)
    plain = lora | {"base": "none", "double_quant": False}
    losses, trained, said = [], [], []
    for start, options in ((directory, lora), (values, plain)):
        place = tmp_path / f"run of {start.name}"
        trainer = trainer_of(start, data, place, precision="fp64", train=train, **options)
        losses.append([(each.loss, each.grad_norm) for each in (trainer.step() for _ in range(3))])
        trained.append(global_tensors(trainer))
        saved = str(trainer.save())
        trainer.close()
        capsys.readouterr()
        words = ["--prompt", "abc", "--tokens", "8", "--temperature", "0", "--tokenizer", "byte", "--precision", "fp32"]
        assert generate.main([saved, *words]) == 0
        said.append(capsys.readouterr().out)
    for ours, theirs in zip(*losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert losses[0][0][0] != losses[0][2][0]
    for name, value in trained[0].items():  # without the base
        assert (value - trained[1][name]).abs().max() <= 1e-12, name
    assert said[0].replace("run of model", "") == said[1].replace("run of values", "")


def test_a_merged_model_in_four_bits_is_read_by_transformers_and_here(models, prefix, tmp_path: Path, capsys):
    import transformers
    from bitsandbytes import functional

    trainer = trainer_of(models["llama"], prefix, tmp_path)
    trainer.step(), trainer.step()
    saved = trainer.save()
    trainer.close()
    words = ["export", str(saved), str(tmp_path / "nf4"), "--dtype", "nf4", "--evaluate", "5", "--json"]
    assert convert.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert re.search(r"nf4 has changed the matrices of layers by [0-9.]+%", " ".join(said["notes"]))
    assert convert.main(["export", str(saved), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    assert trainer.validation_data is not None
    rows = [trainer.validation_data[number] for number in range(5)]
    ids, targets = (
        torch.tensor(np.stack(each)) for each in zip(*((row.tokens, row.targets) for row in rows), strict=True)
    )
    losses = [
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        for logits in (
            our_logits(load_stage(open_source(saved)), ids),
            logits_of(tmp_path / "merged", ids),
            our_logits(load_stage(open_source(f"hf:{tmp_path / 'nf4'}")), ids),
        )
    ]
    assert [*said["losses"].values()] == pytest.approx(losses, rel=1e-5)
    assert len({round(loss, 7) for loss in losses}) == 3 and "losses" in said and not list(tmp_path.glob(".nf4.*"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", attn_implementation="eager")
    assert type(model.lm_head).__name__ == "Linear"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    quantized = {f"{name}.weight": each for name, each in model.named_modules() if type(each).__name__ == "Linear4bit"}
    assert len(quantized) == 7 * model.config.num_hidden_layers
    for name, module in quantized.items():
        values = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(values, block_formats.rounded(merged[name].float(), "nf4", 64).bfloat16()), name
    ours = open_source(f"hf:{tmp_path / 'nf4'}")
    part = Rectangle(f"weight/{OURS}", merged[MATRIX].shape, (0, 0), torch.empty(merged[MATRIX].shape))
    ours.read([part])
    assert torch.equal(part.tensor, block_formats.rounded(merged[MATRIX].float(), "nf4", 64))


def test_a_base_is_that_of_the_start_whatever_its_run_does_later(models, prefix, tmp_path: Path):
    """A run directory names another checkpoint later. A base that has moved is named again. A run that goes back does
    not read it again."""
    source = trainer_of(models["llama"], prefix, tmp_path / "source", base="none", rank=0)
    source.save()
    trainer = trainer_of(models["llama"], prefix, tmp_path, weights=str(tmp_path / "source" / "run"))
    trainer.step()
    saved = trainer.save()
    second = trainer.step().loss
    source.step()
    newer = source.save()
    source.close()
    first = tmp_path / "source" / "run" / "checkpoints" / "step_00000000"
    assert trainer.store.base is not None and trainer.store.base["source"] == str(first)
    again = trainer_of(models["llama"], prefix, tmp_path, str(saved), weights=str(tmp_path / "source" / "run"))
    assert again.step().loss == second
    again.close()
    first.rename(tmp_path / "moved")
    checkpointing.resume(trainer, saved)
    with pytest.raises(CheckpointError, match="step_00000000 cannot be read.*has other weights now"):
        load_stage(open_source(saved))
    moved = trainer_of(models["llama"], prefix, tmp_path, str(saved), weights=str(tmp_path / "moved"))
    trainer.close(), moved.close()
    assert newer != first


@pytest.mark.parametrize("double", [False, True])
def test_experts_are_merged_some_rows_at_a_time(double, prefix, tmp_path: Path):
    """Blocks reach into the next row and expert."""
    shape = {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 1, "num_local_experts": 8}
    directory = write(Case("Mixtral", CASES["mixtral"].fields | shape), tmp_path / "model")
    targets = ["q", "experts.in", "experts.down"]
    trainer = trainer_of(directory, prefix, tmp_path, double_quant=double, targets=targets)
    trainer.step(), trainer.step()
    saved = trainer.save()
    trainer.close()
    with patch.object(layout, "AT_ONCE", 1 << 30):
        assert convert.main(["export", str(saved), str(tmp_path / "whole")]) == 0
    with patch.object(layout, "AT_ONCE", 1 << 10), jobs_quantized.LiveBytes() as live:
        assert convert.main(["export", str(saved), str(tmp_path / "rows")]) == 0
    assert live.most < 8 * 2 * 100 * 64 * 4 / 2, "half of the experts of a layer in fp32"
    expected, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "rows"))
    for name, value in expected.items():  # the sum B A of some rows may round in another way
        assert (merged[name] - value).abs().max() <= 1e-6, name
    ids = random_ids(tokens=SEQUENCE)
    ours = our_logits(load_stage(open_source(saved)), ids)
    assert (logits_of(tmp_path / "rows", ids) - ours).abs().max() <= 1e-4


STATE = f"{MATRIX}.quant_state.bitsandbytes__nf4"


def _with_state(tensors: dict[str, Tensor], **changes: Any) -> None:
    state = json.loads(bytes(tensors[STATE].tolist())) | changes
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t: t.update({MATRIX: t[MATRIX][:-1].clone()}), f"{MATRIX} has 4,095 elements, expected 4,096"),
        (lambda t: t.pop(f"{MATRIX}.absmax"), f"{MATRIX}.absmax is missing"),
        (lambda t: t[f"{MATRIX}.absmax"].view(-1)[3:4].fill_(-1), f"{MATRIX} has a negative, infinite or NaN absmax"),
        (lambda t: _with_state(t, blocksize=128), "says blocksize = 128, which is not supported. Supported: 64"),
        (lambda t: _with_state(t, quant_type="fp4"), "says quant_type = 'fp4', which is not supported"),
        (lambda t: _with_state(t, shape=[64, 64]), "has 4,096 elements, expected 2,048"),
        (lambda t: t[f"{MATRIX}.quant_map"].neg_(), f"{MATRIX}.quant_map has other values than the format nf4"),
        (lambda t: t.update({STATE: t[STATE][:-3].clone()}), "is not the state of a quantized matrix"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(break_it, message, saved, tmp_path: Path):
    check_refused(break_it, message, saved["nf4", False], tmp_path)


ROWS = f"{MATRIX.removesuffix('weight')}SCB"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t: t.update({ROWS: t[ROWS][:-1].clone()}), f"{ROWS} has 127 elements, expected 128"),
        (lambda t: t[ROWS][3:4].fill_(-1), f"{MATRIX} has a negative, infinite or NaN absmax"),
        (lambda t: t.update({MATRIX: t[MATRIX].float()}), f"{MATRIX} has type torch.float32, expected codes in int8"),
        (lambda t: t.pop(MATRIX), f"{MATRIX} is missing, expected codes in int8"),
        (lambda t: t[f"{ROWS[:-3]}weight_format"].fill_(2), "weight_format = 2, which is not supported"),
        (lambda t: t.pop(ROWS), f"{ROWS} is missing for a matrix [128, 64]"),
    ],
)
def test_a_damaged_directory_in_8_bits_is_refused_by_name(break_it, message, saved, tmp_path: Path):
    check_refused(break_it, message, saved["int8", False], tmp_path)


def check_refused(break_it: Callable[[dict[str, Tensor]], Any], message: str, saved: Path, place: Path) -> None:
    directory = Path(shutil.copytree(saved, place / "damaged"))
    tensors = load_file(directory / "model.safetensors")
    break_it(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=re.escape(message)):
        load_stage(open_source(f"hf:{directory}"))


def test_commands_read_a_base_that_has_moved_where_they_are_told(models, prefix, tmp_path: Path, capsys):
    fields = MODELS["llama"].fields | {"vocab_size": 260}
    directory = write(Case("Llama", fields), tmp_path / "model")
    trainer = trainer_of(directory, prefix, tmp_path, dora=True)
    trainer.step()
    saved, whole = trainer.save(), global_tensors(trainer)
    trainer.close()
    ids = random_ids(tokens=SEQUENCE)
    wanted = our_logits(load_stage(open_source(saved)), ids)
    moved = directory.rename(tmp_path / "moved")
    (tmp_path / "text").write_text("a text")

    def refused(main: Any, *words: str | Path) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main([*map(str, words)])
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        return str(err)

    there = ("--base", str(moved))
    assert "name their new place: with --base" in refused(convert.main, "export", saved, tmp_path / "a")
    assert convert.main(["export", str(saved), str(tmp_path / "merged"), *there]) == 0
    assert (logits_of(tmp_path / "merged", ids) - wanted).abs().max() <= 1e-4
    assert convert.main(["adapter-export", str(saved), str(tmp_path / "adapter"), *there]) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(moved)
    assert (quantized_logits(moved, tmp_path / "adapter", False, ids) - wanted).abs().max() <= 1e-4
    assert convert.main(["check", str(saved), str(tmp_path / "merged"), *there]) == 0
    file = tmp_path / "all.safetensors"
    assert checkpoint.main(["consolidate", str(saved), str(file)]) == 0
    assert OURS not in load_file(file)
    assert f"--base hf:{directory} writes their values, too" in capsys.readouterr().out
    file.unlink()
    assert checkpoint.main(["consolidate", str(saved), str(file), *there]) == 0
    consolidated, matrix = load_file(file), load_file(moved / "model.safetensors")[MATRIX]
    assert {f"weight/{name}" for name in consolidated} >= {name for name in whole if name.startswith("weight/")}
    assert torch.equal(consolidated[OURS], block_formats.rounded(matrix, "nf4", 64))
    byte = ("--tokenizer", "byte", "--precision", "fp32")
    assert generate.main([str(saved), "--prompt", "a", "--tokens", "2", *byte, *there]) == 0
    assert evaluate.main(["perplexity", str(saved), "--text", str(tmp_path / "text"), *byte, *there]) == 0
    words = ["--data", prefix, "--output", str(tmp_path / "words"), "--top_k", "2", "--sequence_length", "8"]
    assert score.main([str(saved), *words, *there]) == 0
    assert "has other weights than the base on which" in refused(
        convert.main, "export", saved, tmp_path / "a", "--base", models["llama"]
    )
    nowhere = refused(convert.main, "export", saved, tmp_path / "a", "--base", "nowhere")
    assert "--base nowhere cannot be read" in nowhere
    assert convert.main(["import", str(moved), str(tmp_path / "imported")]) == 0
    for name in (tmp_path / "imported", f"hf:{moved}"):
        assert f"--base hf:{moved} has no effect" in refused(generate.main, name, "--prompt", "a", *byte, *there)


SOURCES = {
    "bf16": ({}, "start"),
    "double": ({"double_quant": True}, "start"),
    "int8": ({"base": "int8"}, "start"),
    "fused": ({"base": "mxfp4"}, "phi3"),
    "in 4 bits": ({"double_quant": True}, "saved"),
    "in 8 bits": ({"base": "int8"}, "saved in 8"),
    "checkpoint": ({}, "imported"),
    "random": ({}, None),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, str | None]:
    """Models whose matrices are much larger than the ranges in which they are read."""
    place = tmp_path_factory.mktemp("starts")
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    named = {"start": "llama", "phi3": "phi3"}
    for name, case in named.items():
        write(Case(MODELS[case].family, MODELS[case].fields | shape), place / name)
    by_bitsandbytes(place / "start", True).save_pretrained(place / "saved")
    by_bitsandbytes(place / "start", False, "int8").save_pretrained(place / "saved in 8")
    assert convert.main(["import", str(place / "start"), str(place / "imported")]) == 0
    hf: dict[str | None, str | None] = {name: f"hf:{place / name}" for name in ("start", "phi3", "saved", "saved in 8")}
    return hf | {"imported": str(place / "imported"), None: None}


@pytest.mark.parametrize("source", SOURCES)
def test_a_base_is_read_in_the_memory_that_is_planned(source, starts):
    lora, name = SOURCES[source]
    start = starts[name]
    shape: dict[str, Any] = hf_shape(str(starts["phi3" if name == "phi3" else "start"]).removeprefix("hf:"))
    config = {
        "model": shape | {"init_from": start or "none"},
        "lora": {"rank": 4, "base": "nf4"} | lora,
        "parallel": {"dp": 1},
    }
    most, planned, largest = jobs_quantized.loading(None, config, at_once=1 << 12)
    assert most <= planned
    if name != "imported":  # of a checkpoint chunks are read besides, which are no tensors
        assert most >= 0.65 * planned
    if start and start.startswith("hf:"):  # others read more at a time
        assert planned < largest / 2
