"""What a decoder layer starts on a GPU, found without one: `python -m benchmarks.launches_run SPEC.json`.

megalite's Triton path runs on CPU tensors that claim to be on a GPU, and its kernels are noted instead of
launched: results are undefined, but nothing that the host does depends on them. Compared with it are
transformers' LlamaForCausalLM, eager and without the key-value cache, as `transformers_peer` on a GPU, and
torchtitan's Llama without FSDP2. torchtitan is no dependency, so its Llama is that of `torchtitan_peer` with
one product for q, k and v; the model of torchtitan 0.3.0 itself, with the same attention, gives the same
counts, and four operations more in the forward if it is given positions. All weights are bf16. Forward and
backward of one microbatch are counted and timed with two depths, without clipping and update; the difference
is that of layers.

On a GPU, an operation of ATen that computes is one kernel or, as the backward of attention and norms, more. A
CPU build of torch has RMSNorm only in parts: torchtitan's is counted as LayerNorm, one operation each way.
megalite's attention is Triton's; where `attention_routes` prefers a library, it is one operation each way.
The times are without Triton's launcher, but include tiny computations of torch, of every operation.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it would look for a GPU

import torch
import torch.nn.functional as F
from megalite_kernels import weight_grad
from megalite_kernels.launch import Variant
from torch import Tensor

from benchmarks.counting import StepCounter, counts, of_a_layer
from benchmarks.host_run import alternating, with_layers
from benchmarks.measure import finish, read_spec
from benchmarks.torchtitan_peer import Llama, OneProjection
from benchmarks.transformers_peer import training_step
from megalite.assembly import parts as build
from megalite.config.schema import Config
from megalite.training.trainer import Trainer

Pass = Callable[[], object]


@contextmanager
def like_a_gpu(note: Callable[[str], None]) -> Iterator[None]:
    """Context manager in which CPU tensors are treated as a GPU's, without kernels.

    Args:
        note: called with "kernels" at each launch of Triton, and with "operations" at a matmul that a CPU
            lacks.
    """

    def launch(variant: Variant, grid: tuple[int, ...], *args: Any) -> None:
        note("kernels")

    def add_matmul(grad: Tensor, left: Tensor, inputs: Tensor, overwrite: bool) -> None:
        note("operations")

    def layer_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, shape, weight, None, eps)

    with ExitStack() as stack:
        for change in (
            patch.object(Variant, "launch", launch),
            patch.dict(weight_grad.ROUTES, {"addmm": add_matmul}),
            patch.object(torch.Tensor, "is_cuda", True, create=True),
            patch.object(F, "rms_norm", layer_norm),
            # registered operations call their host functions, as they do in eager mode, also while counted
            patch.object(torch._C, "_len_torch_dispatch_stack", lambda: 0),
        ):
            stack.enter_context(change)
        yield


def own_pass(config: Config) -> Pass:
    """Return a function that runs forward and backward of megalite."""
    trainer = Trainer(config, build.make_mesh(config))
    microbatches, store = trainer.loader.step(0), trainer.store

    def run() -> None:
        store.reducer.begin_step(len(microbatches))
        trainer.parts.runtime.run(trainer.schedule, microbatches, step=1, loss_scale=1.0)
        store.reducer.finish()

    return run


def transformers_pass(config: Config) -> Pass:
    model, _ = training_step(config, all_bf16=True)
    model.config.use_cache = False
    tokens = _tokens(config)

    def run() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    return run


def torchtitan_pass(config: Config) -> Pass:
    model, tokens = (
        Llama(config.model, config.data.sequence_length, OneProjection).bfloat16(),
        _tokens(config),
    )

    def run() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()

    return run


def _tokens(config: Config) -> Tensor:
    return torch.randint(
        config.model.vocabulary, (config.train.micro_batch_size, config.data.sequence_length)
    )


PROGRAMS: dict[str, Callable[[Config], Pass]] = {
    "megalite, Triton": own_pass,
    "transformers": transformers_pass,
    "torchtitan": torchtitan_pass,
}


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(1)
    deep, shallow = spec["layers"]
    with like_a_gpu(lambda kind: None):
        passes = {
            name: [make(with_layers(spec["config"], layers)) for layers in spec["layers"]]
            for name, make in PROGRAMS.items()
        }
        gc.collect()
        gc.freeze()
        gc.disable()
        times = [
            alternating([run[depth] for run in passes.values()], spec["warmup_steps"], spec["steps"])
            for depth in range(2)
        ]
    result = {}
    for index, (name, runs) in enumerate(passes.items()):
        counted = []
        for run in runs:
            counter = StepCounter()
            with like_a_gpu(counter.count):
                counted.append(counts(run, counter))
        seconds = [median(processor for _, processor in depth[index]) for depth in times]
        us = 1e6 * (seconds[0] - seconds[1]) / (deep - shallow)
        result[name] = {**of_a_layer(counted[0], counted[1], deep - shallow), "us_per_layer": us}
    finish(spec, result)


if __name__ == "__main__":
    main()
