"""Adapters and their variants against PEFT: logits of the same adapter, merged and not; one step; the way in and out;
what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.assembly.plan import specs_of
from megalite.checkpoint import CheckpointError
from megalite.commands import convert as convert_hf
from megalite.config.load import from_dict
from megalite.config.sections.lora import LoraConfig
from megalite.data.indexed import IndexedTokens
from megalite.evaluation.logits import load_stage, our_logits
from megalite.families.model_config import hf_shape
from megalite.families.module_names import FAMILY_NAMES
from megalite.generation.sources import open_source
from megalite.huggingface.adapter_export import export_adapter
from megalite.huggingface.adapter_import import OFF
from megalite.huggingface.peft_modules import FUSED_FAMILIES
from megalite.parallel.spec import parameter_count
from megalite.training.memory_report import report
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.huggingface.hf_models import CASES, VOCAB, load, logits_of, make, random_ids, write
from tests.huggingface.served import READ
from tests.support.configs import write_tokens

SEQUENCE, BATCH, LR, DECAY, EPS = 24, 4, 1e-3, 0.1, 1e-8
NAMES = (
    "llama, one key-value head",
    "phi3",
    "gpt_neox",
    "gpt2",
    "cohere, norms of each head",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
)
NAMES += ("qwen2_moe, a dense layer", "glm4_moe", "gpt_oss", "mistral4", "granitemoehybrid", "nemotron_h")
NAMES += ("granitemoeshared, tied, biases", "hy_v3", "afmoe", "cohere2_moe", "hunyuan_v1_moe", "laguna")
NAMES += ("qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2")
FUSED = ("deepseek_v3", "glm4_moe", "gpt_oss")
RANKS: dict[str, Any] = {"ranks": {"v": 2, "down": 3}, "alphas": {"v": 5.0, "o": 7.0}}
SHARED_RANKS: dict[str, Any] = {"ranks": {"down": 3}, "alphas": {"gate": 9.0}}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama, one key-value head", {}),
    "llama, DoRA": (
        "llama, one key-value head",
        {"dora": True, "scaling": "rslora", "modules_to_save": ["head", "norms"]},
    ),
    "phi3, ranks": ("phi3", RANKS | {"scaling": "rslora"}),
    "phi3, DoRA on a part of a module": ("phi3", {"targets": ["q", "v", "o", "down"], "dora": True} | RANKS),
    "gpt_neox": ("gpt_neox", {}),
    "deepseek_v3": ("deepseek_v3", {"targets": ["q_a", "q_b", "kv_a", "kv_b", "o"], "ranks": {"kv_a": 2, "q_b": 3}}),
    "gpt2, all in full": ("gpt2", {"targets": ["q", "v", "down"], "modules_to_save": ["embedding", "norms"]}),
    "gpt2, DoRA, ranks": ("gpt2", {"dora": True} | RANKS),
    "cohere, norms of each head": ("cohere, norms of each head", {"modules_to_save": ["norms"]}),
    "mixtral, experts": ("mixtral", {"targets": ["q", "v", "experts.in", "experts.down"], "scaling": "rslora"}),
    "qwen3_moe, a part of experts": (
        "qwen3_moe",
        {"targets": ["o", "experts.down"], "ranks": {"experts.down": 2}, "alphas": {"o": 7.0}},
    ),
    "qwen2_moe, DoRA on dense and shared": (
        "qwen2_moe, a dense layer",
        {"targets": ["k", "gate", "down"], "dora": True},
    ),
    "deepseek_v3, dense and shared": (
        "deepseek_v3",
        {"targets": ["kv_b", "gate", "up", "down"], "dropout": 0.1} | SHARED_RANKS,
    ),
    "deepseek_v3, everything": (
        "deepseek_v3",
        {
            "targets": ["q_a", "gate", "down", "experts.in", "experts.down"],
            "scaling": "rslora",
            "modules_to_save": ["head"],
        }
        | SHARED_RANKS,
    ),
    "glm4_moe, shared alone": ("glm4_moe", {"targets": ["up", "down"]}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, experts": (
        "gpt_oss",
        {"targets": ["q", "o", "experts.in", "experts.down"], "ranks": {"experts.down": 2}, "alphas": {"o": 7.0}},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {"targets": ["q", "attention_gate", "delta_v", "delta_z", "gate", "down"]},
    ),
    "olmo_hybrid, DoRA": ("olmo_hybrid", {"dora": True, "modules_to_save": ["norms"]}),
    "kimi_linear": ("kimi_linear", {"targets": ["q", "o", "delta_q", "delta_f_a", "delta_g_b", "delta_o", "down"]}),
    "lfm2": ("lfm2", {"scaling": "rslora"}),
    "gpt_oss, a part of experts": ("gpt_oss", {"targets": ["experts.in"], "scaling": "rslora"}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "targets": ["q", "mamba_x", "mamba_B", "mamba_dt", "mamba_o", "gate", "up", "experts.in", "experts.down"],
            "alpha": 24.0,
        },
    ),
    "nemotron_h": ("nemotron_h", {"targets": ["v", "mamba_x", "mamba_C", "up", "down"]}),
    "granitemoeshared": (
        "granitemoeshared, tied, biases",
        {"targets": ["q", "gate", "up", "experts.down"], "alpha": 120.0},
    ),
    "hy_v3, dense and shared": ("hy_v3", {"targets": ["v", "gate", "up", "down"], "alpha": 24.0}),
    "afmoe": ("afmoe", {"targets": ["q", "attention_gate", "gate", "down", "experts.in"], "alpha": 24.0}),
    "cohere2_moe, everything": ("cohere2_moe", {"targets": ["o", "gate", "up", "down", "experts.down"], "alpha": 24.0}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"targets": ["q", "gate", "down"], "alpha": 24.0}),
    "laguna": ("laguna", {"targets": ["k", "v", "o", "attention_gate", "experts.in"], "alpha": 24.0}),
    "mistral4": ("mistral4", {"targets": ["q_b", "kv_a", "o", "gate", "down", "experts.in", "experts.down"]}),
    "nemotron_h, experts": ("nemotron_h", {"targets": ["o", "experts.in", "experts.down"]}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: write(CASES[name], place / str(number)) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=2000)


def trainer_of(
    directory: Path, prefix: str, place: Path, start: str | None = None, precision: str = "fp32", **lora: Any
) -> Trainer:
    config = {
        "run": {"dir": str(place), "name": "run"},
        "model": hf_shape(str(directory)) | {"init_from": start or f"hf:{directory}", "from_hf": str(directory)},
        "lora": {"rank": 4, "alpha": 6.0} | lora,
        "parallel": {"dp": 1},
        "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
        "train": {
            "steps": 2,
            "global_batch_size": BATCH,
            "micro_batch_size": BATCH,
            "grad_clip": 0.0,
            "precision": precision,
        },
        "optimizer": {"lr": LR, "decay": "constant", "weight_decay": DECAY, "eps": EPS},
        "checkpoint": {"load": "none"},
    }
    run_config = from_dict(config)
    return Trainer(run_config, make_mesh(run_config))


def peft_logits(base: Path, adapter: Path, ids: Tensor) -> Tensor:
    from peft import PeftModel

    model = load(base)
    model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_goes_out_merged_and_alone_and_comes_in_again(case, models, prefix, tmp_path: Path):
    name, lora = ADAPTERS[case]
    trainer = trainer_of(models[name], prefix, tmp_path, **lora)
    trainer.step(), trainer.step()
    saved = trainer.save()
    trained = global_tensors(trainer)
    trainer.close()
    ids = random_ids(tokens=SEQUENCE)
    ours = our_logits(load_stage(open_source(saved)), ids)
    before = logits_of(models[name], ids)
    assert (ours - before).abs().max() > 1e-2 * before.abs().max().clamp(max=1), "the adapter does something"
    assert convert_hf.main(["adapter-export", str(saved), str(tmp_path / "adapter")]) == 0
    assert convert_hf.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    limit = 1e-5 if name in FUSED else 1e-4
    assert (peft_logits(models[name], tmp_path / "adapter", ids) - ours).abs().max() <= limit
    assert (logits_of(tmp_path / "merged", ids) - ours).abs().max() <= limit
    again = trainer_of(models[name], prefix, tmp_path / "again", **lora, init_from=str(tmp_path / "adapter"))
    for key, value in global_tensors(again).items():  # to rounding where a factor or a length was folded in
        torch.testing.assert_close(
            value, trained[key], rtol=0, atol=2e-6 if RANKS.items() <= lora.items() or lora.get("dora") else 0
        )
    again.close()


def test_starts_alike_from_a_directory_and_from_a_checkpoint(models, prefix, tmp_path: Path):
    directory = models["phi3"]
    assert convert_hf.main(["import", str(directory), str(tmp_path / "imported")]) == 0

    def start(base: str, **lora: Any) -> tuple[float, float, Path]:
        trainer = trainer_of(directory, prefix, tmp_path / str(len(base)), base, **lora)
        first, second = trainer.step(), trainer.step()
        saved = trainer.save()
        trainer.close()
        return first.loss, second.loss, saved

    *losses, saved = start(f"hf:{directory}")
    assert start(str(tmp_path / "imported"))[:2] == tuple(losses)
    assert convert_hf.main(["adapter-export", str(saved), str(tmp_path / "adapter")]) == 0
    *losses, _ = start(f"hf:{directory}", init_from=str(tmp_path / "adapter"))
    assert start(str(tmp_path / "imported"), init_from=str(tmp_path / "adapter"))[:2] == tuple(losses)


@pytest.mark.parametrize(("before", "now"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_row_lengths_come_in_at_another_precision(before, now, models, prefix, tmp_path: Path, capsys):
    """The lengths of rows without an adapter, k's in Phi-3's qkv_proj, are those of the rounded weights; other lengths
    are refused. A merged export says that they are rounded."""
    options: dict[str, Any] = {"dora": True, "targets": ["q", "v"]}
    trainer = trainer_of(models["phi3"], prefix, tmp_path, precision=before, **options)
    saved = trainer.save()
    trainer.close()
    adapter = tmp_path / "adapter"
    assert convert_hf.main(["adapter-export", str(saved), str(adapter)]) == 0
    assert convert_hf.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    assert ("in bfloat16: the run rounded the weights of" in capsys.readouterr().out) == (before == "bf16")
    options |= {"precision": now, "init_from": str(adapter)}
    trainer_of(models["phi3"], prefix, tmp_path / "again", **options).close()
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in tensors:
        if "qkv_proj.lora_magnitude" in key:
            tensors[key] *= 1.001
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="qkv_proj adapts outputs that are not in lora.targets"):
        trainer_of(models["phi3"], prefix, tmp_path / "other", **options)


def test_merging_leaves_rows_of_zeros_at_zero(prefix, tmp_path: Path):
    model = make(CASES["phi3"])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] = 0
    model.save_pretrained(tmp_path / "base")
    trainer = trainer_of(tmp_path / "base", prefix, tmp_path, dora=True)
    saved = trainer.save()
    trainer.close()
    assert convert_hf.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    ids = random_ids(tokens=SEQUENCE)
    assert (logits_of(tmp_path / "merged", ids) - logits_of(tmp_path / "base", ids)).abs().max() <= 1e-6


def test_what_peft_has_not_on_parameters_is_said(models, prefix, tmp_path: Path):
    """Dense and shared projections of such a family are parameters to PEFT: without dropout, and without DoRA."""

    def exported(**lora: Any) -> dict[str, Any]:
        place = tmp_path / str(len(lora))
        trainer = trainer_of(models["glm4_moe"], prefix, place, **lora)
        saved = trainer.save()
        trainer.close()
        return export_adapter(saved, place / "adapter")

    assert any("lora_dropout was 0.1 in the run" in note for note in exported(dropout=0.1)["notes"])
    with pytest.raises(
        CheckpointError, match="PEFT does not support DoRA for model.layers.0.mlp.down_proj of a glm4_moe model"
    ):
        exported(dora=True, targets=["q", "down"])
    assert not any("dropout" in note for note in exported(dora=True, targets=["q"], dropout=0.1)["notes"])


@pytest.mark.parametrize(
    ("name", "targets", "refused"),
    [
        (
            "nemotron_h",
            ["mamba_x", "mamba_o"],
            "refuses adapters of model.layers.0.mixer.out_proj in a nemotron_h model",
        ),
        (
            "laguna",
            ["q", "up"],
            "does not load adapters of model.layers.1.mlp.shared_experts.up_proj in a laguna model",
        ),
    ],
)
def test_a_module_that_peft_does_not_adapt_is_named(name, targets, refused, models, prefix, tmp_path: Path):
    trainer = trainer_of(models[name], prefix, tmp_path, targets=targets)
    saved = trainer.save()
    trainer.close()
    with pytest.raises(CheckpointError, match=f"PEFT {refused}"):
        export_adapter(saved, tmp_path / "adapter")


def test_all_families_whose_dense_projections_peft_takes_for_experts_are_known():
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as like

    ends = tuple(f".{part}_proj" for part in ("gate", "up", "down"))
    dense = {family for family, names in FAMILY_NAMES.items() if any(name.endswith(ends) for name in names.layer)}
    dense -= {"olmoe", "flex_olmo"}  # all their layers have experts, and none are shared
    assert {family for family in dense if like.get(family) == "qwen2_moe"} == {*FUSED_FAMILIES}


def test_adapters_on_weights_that_nothing_gave_are_reported(models, prefix, tmp_path: Path):
    """Frozen random weights are mostly an option forgotten."""
    trainer = trainer_of(models["phi3"], prefix, tmp_path)
    assert "the others are frozen" in " ".join(report(trainer)) and "random" not in " ".join(report(trainer))
    config = replace(trainer.config, model=replace(trainer.config.model, init_from=None))
    trainer.close()
    trainer = Trainer(config, make_mesh(config))
    assert any("randomly initialized: set model.init_from" in line for line in report(trainer))
    trainer.step()
    assert not any("random" in line for line in report(trainer))
    trainer.close()


STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a model, PEFT's options, ours
    "rslora, another alpha": (
        "llama, one key-value head",
        {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
        {"alpha": 12.0, "targets": ["q", "v", "o", "up", "down"]},  # 12 / 4 = 6 / sqrt(4)
    ),
    "DoRA, ranks, head and norms in full": (
        "llama, one key-value head",
        {
            **{
                "use_dora": True,
                "use_rslora": True,
                "target_modules": "all-linear",
                "modules_to_save": ["lm_head", "norm", "input_layernorm"],
            },
            **{"rank_pattern": {"down_proj": 2, "q_proj": 3}, "alpha_pattern": {"v_proj": 9}},
        },
        {
            **{"dora": True, "scaling": "rslora", "modules_to_save": ["head", "norms"]},
            **{"ranks": {"down": 2, "q": 3}, "alphas": {"v": 9.0}},
        },
    ),
    "DoRA, a tied embedding in full": (
        "cohere, norms of each head",
        {
            **{"use_dora": True, "target_modules": ["q_proj", "k_proj", "up_proj"]},
            **{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        },
        {"dora": True, "targets": ["q", "k", "up"], "modules_to_save": ["embedding"]},
    ),
    "experts": (
        "qwen3_moe",
        {
            **{
                "target_modules": ["k_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
            **{"rank_pattern": {"mlp.experts.down_proj": 2}, "alpha_pattern": {"k_proj": 9}},
        },
        {"targets": ["k", "experts.in", "experts.down"], "ranks": {"experts.down": 2}, "alphas": {"k": 9.0}},
    ),
    "dense and shared, given as weights": (
        "deepseek_v3",
        {
            **{
                "target_modules": ["o_proj"],
                "target_parameters": ["gate_proj.weight", "up_proj.weight", "mlp.experts.down_proj"],
            },
            **{"rank_pattern": {"up_proj.weight": 2}, "alpha_pattern": {"gate_proj.weight": 9}},
        },
        {"targets": ["o", "gate", "up", "experts.down"], "ranks": {"up": 2}, "alphas": {"gate": 9.0}},
    ),
    "gpt_oss, experts": (
        "gpt_oss",
        {
            **{
                "target_modules": ["q_proj", "v_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
            **{"rank_pattern": {"mlp.experts.gate_up_proj": 3}, "alpha_pattern": {"v_proj": 9}},
        },
        {"targets": ["q", "v", "experts.in", "experts.down"], "ranks": {"experts.in": 3}, "alphas": {"v": 9.0}},
    ),
    "DoRA, transposed matrices": (
        "gpt2",
        {
            "use_dora": True,
            "target_modules": ["c_fc", "c_proj"],
            "fan_in_fan_out": True,
            "rank_pattern": {"mlp.c_proj": 3},
        },
        {"dora": True, "targets": ["o", "up", "down"], "ranks": {"down": 3}},
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_one_step_from_an_adapter_is_one_step_of_peft(case, models, prefix, tmp_path: Path):
    import peft

    name, theirs, lora = STEPS[case]
    directory = models[name]
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | theirs
    model = peft.get_peft_model(make(CASES[name]), peft.LoraConfig(**options))
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    torch.manual_seed(1)
    with torch.no_grad():
        for key, value in trained.items():
            if "lora_B" in key:
                torch.nn.init.normal_(value, std=0.1)
            elif "magnitude" in key:
                value.mul_(1 + 0.1 * torch.randn(value.shape))
    model.save_pretrained(tmp_path / "adapter")
    trainer = trainer_of(directory, prefix, tmp_path, **lora, init_from=str(tmp_path / "adapter"))
    result = trainer.step()
    saved = trainer.save()
    trainer.close()
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    logits = model(input_ids=tokens[:-1].view(BATCH, SEQUENCE)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    counted = [spec for spec in specs_of(trainer.config, 0) if spec.trainable]
    assert parameter_count(counted) == sum(value.numel() for value in trained.values())
    decayed = [value for key, value in trained.items() if "norm" not in key and "magnitude" not in key]
    others = [value for key, value in trained.items() if "norm" in key or "magnitude" in key]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=EPS).step()
    assert convert_hf.main(["adapter-export", str(saved), str(tmp_path / "out")]) == 0
    ours = peft.load_peft_weights(str(tmp_path / "out"), device="cpu")
    wanted = peft.get_peft_model_state_dict(model)
    assert wanted.keys() == ours.keys()
    for key, value in wanted.items():
        assert (ours[key] - value).abs().max() <= 2e-5, key


def test_what_is_no_adapter_of_the_run_is_refused(models, prefix, tmp_path: Path):
    directory = models["phi3"]
    trainer = trainer_of(directory, prefix, tmp_path, targets=["q", "k"])
    trainer.step(), trainer.step()
    saved = trainer.save()
    trainer.close()
    adapter = tmp_path / "adapter"
    assert convert_hf.main(["adapter-export", str(saved), str(adapter)]) == 0

    def refusal(**lora: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            trainer_of(directory, prefix, tmp_path / "other", init_from=str(adapter), **lora)
        return str(caught.value)

    assert "layers.0.self_attn.o_proj.lora_A.weight is missing" in refusal(targets=["q", "k", "o"])
    assert "model.layers.0.self_attn.qkv_proj has rank 8, but lora.rank=2" in refusal(targets=["q", "k"], rank=2)
    assert "model.layers.0.self_attn.qkv_proj adapts outputs that are not in lora.targets" in refusal(
        targets=["q"], rank=8
    )
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert set(READ["adapter"].split()) <= settings.keys() and settings["bias"] == "none"
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    assert "adapter_config.json has use_dora=true, which does not match lora.dora=false. Set lora.dora=true" in refusal(
        targets=["q", "k"]
    )
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    norm = "base_model.model.model.layers.0.input_layernorm.weight"
    assert f"{norm} is missing" in refusal(targets=["q", "k"], modules_to_save=["norms"])
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_qalora": True}))
    assert "adapter_config.json sets use_qalora = True, which is not supported" in refusal(targets=["q", "k"])
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"unsloth_version": "2026.4"}))
    trainer_of(directory, prefix, tmp_path / "marked", init_from=str(adapter), targets=["q", "k"]).close()
    run_config = trainer.config
    run_config.model.init_from, run_config.lora = str(saved), LoraConfig()
    with pytest.raises(CheckpointError, match="contains adapters in addition to its weights, .* Merge them"):
        Trainer(run_config, make_mesh(run_config))


def test_every_setting_of_peft_is_judged():
    """Settings that are read, or do not change what an adapter computes; the others must be off."""
    from dataclasses import fields

    import peft

    read = """peft_type task_type peft_version auto_mapping base_model_name_or_path revision inference_mode r
        lora_alpha rank_pattern alpha_pattern use_rslora use_dora modules_to_save target_modules
        exclude_modules layers_to_transform layers_pattern lora_dropout fan_in_fan_out bias init_lora_weights
        runtime_config ensure_weight_tying megatron_core qalora_group_size eva_config loftq_config
        corda_config lora_ga_config target_parameters"""
    assert {each.name for each in fields(peft.LoraConfig)} == {*read.split(), *OFF.split()}


def test_an_adapter_is_the_file_that_peft_loads_and_finite(models, prefix, tmp_path: Path):
    """adapter_model.safetensors before adapter_model.bin, and no index."""
    directory = models["phi3"]
    trainer = trainer_of(directory, prefix, tmp_path)
    saved = trainer.save()
    trainer.close()
    adapter = tmp_path / "adapter"
    assert convert_hf.main(["adapter-export", str(saved), str(adapter)]) == 0
    whole = adapter / "adapter_model.safetensors"
    tensors = load_file(whole)
    torch.save({key: value + 1 for key, value in tensors.items()}, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors.index.json").write_text("{}")
    trained = global_tensors(trainer)
    again = trainer_of(directory, prefix, tmp_path / "again", init_from=str(adapter))
    assert all(torch.equal(value, trained[key]) for key, value in global_tensors(again).items())
    again.close()
    key = next(key for key in tensors if "down_proj.lora_B" in key)
    tensors[key].view(-1)[:2] = float("nan")
    save_file(tensors, whole)
    with pytest.raises(
        CheckpointError, match=f"lora.init_from={adapter} contains NaN or infinite values(.|\\n)*{key}: 2"
    ):
        trainer_of(directory, prefix, tmp_path / "other", init_from=str(adapter))


def test_a_run_does_not_start_from_a_checkpoint_that_is_not_finite(models, prefix, tmp_path: Path):
    directory = models["phi3"]
    trainer = trainer_of(directory, prefix, tmp_path, rank=0)
    for part in trainer.store.to_load():
        if part.name == "weight/norm.weight":
            part.tensor.view(-1)[:3] = float("nan")
    saved = trainer.save()
    trainer.close()
    with pytest.raises(CheckpointError, match=f"{saved} contains NaN or infinite values(.|\\n)*weight/norm.weight: 3"):
        trainer_of(directory, prefix, tmp_path / "other", str(saved), rank=0)
