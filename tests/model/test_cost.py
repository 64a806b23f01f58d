"""FLOPs against torch's own counter over a plain forward and backward; peaks against data sheets."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.families.presets import preset
from megalite.model.cost.flops import model_flops_per_token, per_token, selection_flops
from megalite.model.cost.records import Kernels
from megalite.model.kinds import KINDS
from megalite.monitoring.metrics import throughput
from megalite.planner.api import peak_flops

LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def counted_flops_per_token(model: ModelConfig, length: int, rank: int = 0) -> float:
    """What torch counts in the matrix products of one forward and backward of the same shapes, with nothing masked
    away; nothing is computed. With a rank everything is frozen, and every projection of a layer has an adapter."""
    from torch.utils.flop_counter import FlopCounterMode

    heads, kv, size, hidden = model.num_attention_heads, model.kv_heads, model.head_size, model.hidden_size

    def weight(out: int, inputs: int, trained: bool = True) -> Tensor:
        return torch.zeros(out, inputs, requires_grad=trained)

    def linear(x: Tensor, out: int) -> Tensor:
        y = F.linear(x, weight(out, x.shape[-1], not rank))
        return y + F.linear(F.linear(x, weight(rank, x.shape[-1])), weight(out, rank)) if rank else y

    def projected(x: Tensor) -> tuple[Tensor, ...]:
        if model.kv_lora_rank is None:
            q, k, v = (
                linear(x, number * size).view(length, number, size).transpose(0, 1) for number in (heads, kv, kv)
            )
            return q, *(part.repeat_interleave(heads // kv, dim=0) for part in (k, v))
        q = linear(x if model.q_lora_rank is None else linear(x, model.q_lora_rank), heads * size).view(
            length, heads, size
        )
        down, plain = linear(x, model.kv_lora_rank + model.qk_rope_head_dim), model.qk_nope_head_dim
        both = linear(down[:, : model.kv_lora_rank], heads * (plain + model.v_head_dim)).view(length, heads, -1)
        shared = down[:, None, model.kv_lora_rank :].expand(-1, heads, -1)
        return tuple(
            each.transpose(0, 1) for each in (q, torch.cat((both[..., :plain], shared), -1), both[..., plain:])
        )

    def layer(x: Tensor) -> Tensor:
        q, k, v = projected(x)
        out = linear((q @ k.transpose(1, 2) @ v).transpose(0, 1).reshape(length, -1), hidden)
        up = linear(out, model.intermediate_size)
        return linear(up * linear(out, model.intermediate_size) if model.gated_mlp else up, hidden)

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        embedding = nn.Embedding(model.vocabulary, hidden)
        x = embedding(torch.zeros(length, dtype=torch.long))
        for _ in range(model.num_hidden_layers):
            x = layer(x)
        F.linear(x, weight(model.vocabulary, hidden, not rank)).sum().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / length


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1},
        {"head_dim": 24, "num_hidden_layers": 3},
        {"gated_mlp": False, "tie_word_embeddings": True},
        LATENTS,
        {**LATENTS, "q_lora_rank": 10},
    ],
    ids=str,
)
def test_equals_what_torch_counts(changes: dict[str, object]) -> None:
    base = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = ModelConfig(**{**base, **changes})  # type: ignore[arg-type]
    assert model_flops_per_token(model, 20) == counted_flops_per_token(model, 20)
    lora = LoraConfig(rank=3)
    assert (
        model_flops_per_token(model, 20, lora)
        == per_token(model, 20, lora=lora).model
        == counted_flops_per_token(model, 20, 3)
    )


def test_adapters_of_some_projections_cost_as_much_as_their_parameters() -> None:
    model = ModelConfig(vocab_size=101, num_hidden_layers=2)
    some, all_ = (
        model_flops_per_token(model, 20, LoraConfig(rank=4, targets=targets)) for targets in (["q", "v"], None)
    )  # type: ignore[list-item]
    assert all_ - some == 6 * 2 * 4 * (2 * 2 * 256 + 3 * (256 + 688))


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m", "llama-3.2-1b", "llama-3-8b", "llama-3-70b"])
def test_presets_cost_what_torch_counts(name: str) -> None:
    model = ModelConfig(**{**preset(name), "num_hidden_layers": 3})
    model.vocab_size = model.vocab_size or 257
    flops = per_token(model, 1024)
    assert flops.model == flops.hardware == counted_flops_per_token(model, 1024)
    assert per_token(model, 1024, embedding=True).model - flops.model == flops.head


def test_conventions_and_recomputation() -> None:
    """Of S positions a token attends to (S + 1) / 2 in the mean under a causal mask. A layer's forward is a third of
    what it costs."""
    model = ModelConfig(vocab_size=101, num_hidden_layers=4)
    palm, causal = per_token(model, 64), per_token(model, 64, "causal")
    assert causal.attention == palm.attention * 65 / 128 and causal.layers == palm.layers and causal.head == palm.head
    assert per_token(model, 64, recompute="full").recomputed == pytest.approx((palm.layers + palm.attention) / 3)
    assert per_token(model, 64, recompute="every-4").recomputed == pytest.approx((palm.layers + palm.attention) / 12)
    assert (
        per_token(model, 64, recompute="selective").recomputed
        == per_token(model, 64, flash=True).recomputed
        == palm.attention / 6
    )
    lora = LoraConfig(rank=2)
    again = (
        per_token(model, 64, recompute="full", lora=lora).recomputed - per_token(model, 64, recompute="full").recomputed
    )
    assert again == pytest.approx(
        (model_flops_per_token(model, 0, lora) - model_flops_per_token(model, 0) * 2 / 3) / 3
    ), "adapters' forward"
    windowed = per_token(ModelConfig(vocab_size=101, num_hidden_layers=4, sliding_window=8), 64, "causal")
    assert windowed.attention * 64 == palm.attention * (8 * 9 / 2 + 56 * 8) / 64


def test_wide_values_have_no_kernel() -> None:
    kernels, attention = Kernels("triton", documents=False, deterministic=False), KINDS["attention"]
    model = ModelConfig(hidden_size=256, num_attention_heads=4, head_dim=64)
    widths = {width: attention.keeps_scores(replace(model, value_head_dim=width), kernels) for width in (32, 256, 512)}
    assert widths == {32: False, 256: False, 512: True}


def test_a_window_bounds_what_attention_costs() -> None:
    shape = {"vocab_size": 101, "num_hidden_layers": 2}
    whole, short = ModelConfig(**shape), ModelConfig(**shape, sliding_window=16, sliding_window_layers=[1])  # type: ignore[arg-type]
    saved = model_flops_per_token(whole, 64) - model_flops_per_token(short, 64)
    assert saved == 12 * (64 - 16) * whole.hidden_size


def test_selected_rows_and_indexers_cost_what_their_formulas_say() -> None:
    """Three products of the selected pairs; of an indexer the scores of all pairs once, those of the selected ones and
    their two gradients for its loss, and of its matrices the forward and the weight's gradient."""
    shape = {"vocab_size": 101, "num_hidden_layers": 2, **LATENTS, "q_lora_rank": 10}
    dense = ModelConfig(**shape)  # type: ignore[arg-type]
    index = {"index_topk": 16, "index_n_heads": 3, "index_head_dim": 6, "indexer_types": ["full", "shared"]}
    trained, frozen = (ModelConfig(**shape, **index, index_loss_coef=loss) for loss in (0.1, 0.0))  # type: ignore[arg-type]
    heads, matrices = dense.num_attention_heads, 3 * 6 * 10 + (6 + 3) * dense.hidden_size
    saved = 2 * 6 * (64 - 16) * heads * (dense.head_size + dense.v_head_dim)
    for model, pairs, passes in ((trained, 64 + 3 * 16, 2), (frozen, 64, 1)):
        got = model_flops_per_token(model, 64) - model_flops_per_token(dense, 64)
        assert got == 2 * passes * matrices + 2 * pairs * 3 * 6 - saved
    flops = selection_flops(trained, 64)
    assert flops is not None and selection_flops(dense, 64) is None
    assert flops.sparse == per_token(trained, 64, "causal").attention
    assert flops.dense == per_token(dense, 64, "causal").attention


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_by_the_name_that_the_driver_reports(name: str, tera: float) -> None:
    assert peak_flops(name, "bf16") == tera * 1e12
    assert peak_flops(name, "fp32") is None


def test_unknown_devices_have_no_peak() -> None:
    assert peak_flops("cpu", "bf16") is None
    assert peak_flops("NVIDIA A1000 Laptop GPU", "bf16") is None


def test_throughput_is_per_second_and_per_rank() -> None:
    config = Config()
    config.model.vocab_size, config.train.precision = 1000, "bf16"
    config.train.global_batch_size, config.data.sequence_length = 8, 128
    metrics = throughput(config, 0.5, 4, "NVIDIA A100-SXM4-80GB")
    assert metrics["tokens_per_second"] == 2048
    assert metrics["tflops_per_gpu"] == pytest.approx(model_flops_per_token(config.model, 128) * 2048 / 4 / 1e12)
    assert metrics["mfu"] == pytest.approx(metrics["tflops_per_gpu"] / 312)
    assert throughput(config, 0.5, 4, "cpu")["mfu"] is None
