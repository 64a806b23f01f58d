"""One measured run of transformers' LlamaForCausalLM: `python -m benchmarks.transformers_peer SPEC.json`.

It is a plain loop with torch's fused AdamW. bf16 is autocast over fp32 weights, the mixed precision of
transformers' own trainer; like megalite, it updates fp32 master weights. With "weights": "bf16", weights,
gradients and optimizer state are bf16: no casts and half the memory, but small updates are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch.optim imports it with the first optimizer; imported here to keep it out of the measured memory
import torch._dynamo
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Memory, device_memory, finish, matmul_peak, read_spec, timed
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.huggingface.config_json import to_hf_config


def training_step(
    config: Config, device: str = "cpu", all_bf16: bool = False
) -> tuple[LlamaForCausalLM, Callable[[], float]]:
    """Return a model with random weights, and a function that trains one step and returns its loss.

    Args:
        all_bf16: whether weights, gradients and optimizer state are bf16.
    """
    torch.manual_seed(0)
    # the key-value cache, by default filled in training too
    without_cache = {"use_cache": False} if device == "cuda" else {}
    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig.from_dict({**to_hf_config(config.model, "llama"), **without_cache})
        )
    if all_bf16:
        model = model.bfloat16()
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        options.lr,
        (options.betas[0], options.betas[1]),
        options.eps,
        options.weight_decay,
        fused=True,
    )
    forward: Any = torch.compile(model) if config.train.compile else model
    tokens = torch.randint(
        config.model.vocabulary, (config.train.micro_batch_size, config.data.sequence_length), device=device
    )
    bf16 = config.train.precision == "bf16"

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=bf16 and not all_bf16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return model, step


def main() -> None:
    spec = read_spec()
    memory = Memory()
    config = from_dict(spec["config"])
    device: str = spec.get("device", "cpu")
    torch.set_num_threads(spec["threads"])
    if spec["matmul"] is not None:
        torch.set_float32_matmul_precision(spec["matmul"])
    model, step = training_step(config, device, all_bf16=spec.get("weights") == "bf16")
    seconds = timed(step, spec["warmup_steps"], spec["steps"])
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    result = {
        "seconds": seconds,
        "peak_rss_above_import": memory.peak_above(),
        **device_memory(device),
        "attention": model.config._attn_implementation,
        "matmul": torch.get_float32_matmul_precision(),
        "peak_flops": matmul_peak(spec["peak_size"], dtype, device=device),
    }
    finish(spec, result)


if __name__ == "__main__":
    main()
