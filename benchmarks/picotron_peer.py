"""One measured run as in picotron (Hugging Face): `python -m benchmarks.picotron_peer SPEC.json`.

Several ranks are started by torchrun. picotron cannot be imported without CUDA and flash-attn, so its
training loop is reimplemented here: its model (`picotron_model`), 1F1B with messages that are awaited
immediately, gradients in buckets of 25 MB that are summed during the last backward, torch's AdamW with its
defaults, and no clipping. Data loading, printing and checkpoints are omitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# torch.optim imports it with the first optimizer; imported here to keep it out of the measured time
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import finish, read_spec, timed
from benchmarks.picotron_model import Axis, PicotronStage
from megalite.config.load import from_dict

BUCKET = 25 * 2**20 // 4  # fp32 elements
Batch = tuple[Tensor, Tensor]  # tokens and targets, [batch, seq]


def axes(tp: int, pp: int, dp: int) -> dict[str, Axis]:
    """Return this rank's axes, with tp innermost and dp outermost. Collective."""
    world, own = tp * pp * dp, dist.get_rank() if dist.is_initialized() else 0
    grid = torch.arange(world).view(dp, pp, tp)
    sizes = {}
    for dim, name in enumerate(("dp", "pp", "tp")):
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if own in ranks:
                sizes[name] = Axis(ranks, ranks.index(own), group)
    return sizes


class Buckets:
    """Flat buckets in which gradients accumulate.

    A bucket is averaged over the dp ranks as soon as all of its gradients are complete.

    Attributes:
        last: whether the current backward is the last one of the step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dp: Axis):
        self.dp, self.last, self.works, self.parameters = dp, False, list[Any](), parameters
        self.buckets = list[list[nn.Parameter]]()
        filled = BUCKET
        for parameter in parameters:
            if filled + parameter.numel() > BUCKET:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(parameter)
            filled += parameter.numel()
        self.flat = [torch.zeros(sum(map(torch.numel, bucket))) for bucket in self.buckets]
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sums: dict[nn.Parameter, Tensor] = {}
        for number, (bucket, flat) in enumerate(zip(self.buckets, self.flat, strict=True)):
            for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                self.sums[parameter] = part.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(
                    lambda given, number=number: self.add(given, number)
                )

    def add(self, parameter: Tensor, number: int) -> None:
        """Add a gradient. Called for every gradient."""
        self.sums[parameter].add_(parameter.grad)  # type: ignore[index, arg-type]
        parameter.grad = None
        if not self.last:
            return
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.flat[number] /= self.dp.size
            self.works.append(dist.all_reduce(self.flat[number], group=self.dp.group, async_op=True))

    def finish(self) -> None:
        """Wait for the averages, and assign them to the parameters."""
        for work in self.works:
            work.wait()
        self.works.clear()
        for parameter, total in self.sums.items():
            parameter.grad = total

    def reset(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        for flat in self.flat:
            flat.zero_()
        for parameter in self.parameters:
            parameter.grad = None


class PicotronPipeline:
    """1F1B over the pp ranks. With a single rank, microbatches are processed one after the other.

    Args:
        shape: of the hidden states of a microbatch.
        on_last: called before the last backward of the step.
    """

    def __init__(self, stage: PicotronStage, pp: Axis, shape: tuple[int, ...], on_last: Callable[[], None]):
        self.stage, self.shape, self.on_last = stage, shape, on_last
        self.before = None if stage.first else pp.ranks[pp.rank - 1]
        self.after = None if stage.last else pp.ranks[pp.rank + 1]
        self.warmup, self.loss = pp.size - pp.rank - 1, 0.0

    def step(self, batches: Sequence[Batch]) -> float:
        """Run all microbatches of a step. Return the loss on the last rank, and 0 elsewhere."""
        self.loss, self.count = 0.0, len(batches)
        warmup, coming = min(self.warmup, len(batches)), iter(batches)
        waiting: deque[tuple[Tensor, Tensor]] = deque()
        for _ in range(warmup):
            waiting.append(self.forward(self.exchange(receive=self.before), next(coming)))
            self.exchange(waiting[-1][1], self.after)
        steady = len(batches) - warmup
        x = self.exchange(receive=self.before) if steady else None
        for number in range(steady):
            waiting.append(self.forward(x, next(coming)))
            grad = self.exchange(waiting[-1][1], self.after, self.after)
            last = number == steady - 1
            gradient = self.backward(*waiting.popleft(), grad, last and not warmup)
            x = self.exchange(gradient, self.before, None if last else self.before)
        for number in range(warmup):
            grad = self.exchange(receive=self.after)
            self.exchange(self.backward(*waiting.popleft(), grad, number == warmup - 1), self.before)
        return self.loss

    def exchange(
        self, tensor: Tensor | None = None, send: int | None = None, receive: int | None = None
    ) -> Tensor | None:
        """Send to one rank, receive from another, and wait for both."""
        received = torch.empty(self.shape, requires_grad=True) if receive is not None else None
        messages = (
            [dist.P2POp(dist.isend, tensor.detach(), send)] if tensor is not None and send is not None else []
        )
        messages += [dist.P2POp(dist.irecv, received.detach(), receive)] if received is not None else []
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def forward(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return input and output of a microbatch. On the last rank the output is the loss."""
        tokens, targets = batch
        given = tokens if x is None else x
        out = self.stage(given)
        if self.stage.last:
            out = F.cross_entropy(out.flatten(0, 1), targets.flatten()) / self.count
            self.loss += out.item()
        return given, out

    def backward(self, given: Tensor, out: Tensor, grad: Tensor | None, last: bool) -> Tensor | None:
        """Return the gradient of the input, which the previous rank needs."""
        if last:
            self.on_last()
        torch.autograd.backward(out, grad)
        return given.grad


def main() -> None:
    spec = read_spec()
    config = from_dict(spec["config"])
    torch.set_num_threads(spec["threads"])
    torch.set_float32_matmul_precision(spec["matmul"])
    parallel, train, length = config.parallel, config.train, config.data.sequence_length
    dp_size = parallel.dp or 1
    if parallel.tp * parallel.pp * dp_size > 1:
        dist.init_process_group("gloo")
    own = axes(parallel.tp, parallel.pp, dp_size)
    dp, pp = own["dp"], own["pp"]
    torch.manual_seed(0)
    stage = PicotronStage(config.model, length, own["tp"], pp)
    parameters = list(stage.parameters())
    optimizer = torch.optim.AdamW(parameters, config.optimizer.lr)
    buckets = Buckets(parameters, dp) if dp.size > 1 else None
    on_last = (lambda: None) if buckets is None else (lambda: setattr(buckets, "last", True))
    pipeline = PicotronPipeline(
        stage, pp, (train.micro_batch_size, length, config.model.hidden_size), on_last
    )
    torch.manual_seed(dp.rank)
    rows = torch.randint(config.model.vocabulary, (train.global_batch_size // dp.size, length + 1))
    batches: Iterable[Batch] = [(each[:, :-1], each[:, 1:]) for each in rows.split(train.micro_batch_size)]

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.tensor(pipeline.step(list(batches)))
        if buckets is not None:
            buckets.finish()
            if stage.last:
                dist.all_reduce(loss, group=dp.group)
        optimizer.step()
        if buckets is not None:
            buckets.reset()
            buckets.last = False
        return float(loss) / dp.size

    seconds = timed(step, spec["warmup_steps"], spec["steps"])
    result = {"seconds": seconds, "matmul": torch.get_float32_matmul_precision()}
    finish(spec, result if not dist.is_initialized() or dist.get_rank() == 0 else None)


if __name__ == "__main__":
    main()
