"""One measured run of transformers' Llama with torch's data parallelism.

Run `python -m benchmarks.sharded_peer SPEC.json` under torchrun. `ddp` is DistributedDataParallel with
ZeroRedundancyOptimizer, which shards the same as ZeRO-1; `fsdp2` applies fully_shard to each layer and to the
root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch.optim imports it with the first optimizer; imported here to keep it out of the measured memory
import torch._dynamo
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Memory, finish, read_spec, timed
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.huggingface.config_json import to_hf_config


class Peer:
    """Run of another project's model on gloo ranks, with its specification and measurement."""

    def __init__(self) -> None:
        self.spec = read_spec()
        self._memory = Memory()
        self.config = from_dict(self.spec["config"])
        torch.set_num_threads(self.spec["threads"])
        torch.set_float32_matmul_precision(self.spec["matmul"])
        dist.init_process_group("gloo")
        torch.manual_seed(0)

    def measure(self, step: Callable[[], None]) -> None:
        """Time the steps, and report on rank 0."""
        seconds = timed(step, self.spec["warmup_steps"], self.spec["steps"])
        peak, matmul = self._memory.peak_above(), torch.get_float32_matmul_precision()
        result = {"seconds": seconds, "peak_rss_above_import": peak, "matmul": matmul}
        finish(self.spec, result if dist.get_rank() == 0 else None)


def main() -> None:
    peer = Peer()
    config = peer.config
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict(to_hf_config(config.model, "llama")))
    model, optimizer = (ddp if peer.spec["peer"] == "ddp" else fsdp2)(model, config)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(
        config.model.vocabulary, (config.train.micro_batch_size, config.data.sequence_length)
    )

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    peer.measure(step)


def adamw_options(config: Config) -> dict[str, Any]:
    options = config.optimizer
    return {
        "lr": options.lr,
        "betas": tuple(options.betas),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": True,
    }


def ddp(model: Any, config: Config) -> tuple[Any, Any]:
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=config.parallel.bucket_mb, gradient_as_bucket_view=True
    )
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, **adamw_options(config)
    )


def fsdp2(model: Any, config: Config) -> tuple[Any, Any]:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), **adamw_options(config))


if __name__ == "__main__":
    main()
