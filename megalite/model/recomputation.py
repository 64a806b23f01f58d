"""Layers whose backward computes again what their forward has not kept.

`full` keeps a layer's input, and runs its whole forward again. Otherwise a set of operations is recomputed
(`config.recomputation` names them, `planning.budget` chooses them): forward runs once and builds its graph as
ever, but of these operations the graph keeps a `Value` in place of each tensor. The first backward that needs
one runs the operation again from its inputs, which may be such values themselves. Each operation runs at most
once more, and only what was dropped is computed; the backward itself is that of a layer that keeps
everything.

The second run repeats the communication of the first, in the order of the backward, which is the same on
every rank that takes part, and computes the same dropout masks, which depend only on their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.config.recompute import operations_of
from megalite.model.forward_state import ForwardState
from megalite.model.transformer import FeedForward, Layer

Run = Callable[[Tensor, ForwardState], Tensor]


def recomputing(layer: Layer, mode: str, exchanged: bool) -> Run | None:
    """What runs a layer's forward in training, with a mode of train.recompute; None: its own `compute`.

    exchanged: attention keeps what it has exchanged over cp, not its inputs (ulysses): these are useful only
    together.
    """
    if mode == "full":
        return lambda x, state: _Recompute.apply(x, layer, state)
    names = operations_of(mode)
    if exchanged and not names.issuperset(("qkv", "attention")):
        names -= {"qkv", "attention"}
    recorder = Recorder(layer)
    _wrap(recorder, layer, names)
    return recorder.run if recorder.wrapped else None


class _Recompute(torch.autograd.Function):
    """Keep only a layer's input; run its forward again in backward. Weight gradients reach their buckets from
    the inner backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, state: ForwardState) -> Tensor:
        ctx.layer, ctx.state = layer, state
        ctx.save_for_backward(x)
        return layer.compute(x, state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        inputs = x.detach().requires_grad_()  # a leaf: the inner backward ends here
        with torch.enable_grad():  # off inside a backward
            out = ctx.layer.compute(inputs, ctx.state)
        torch.autograd.backward(out, grads[0])
        return inputs.grad, None, None


def _wrap(recorder: Recorder, layer: Layer, names: frozenset[str]) -> None:
    """Let the recorder run the operations that are dropped."""
    attention = layer.attention
    if "attn_norm" in names:
        recorder.wrap(layer.attention_input_norm, "forward")
    if "qkv" in names:
        recorder.wrap(attention, "project")
    if "attention" in names:
        recorder.wrap(attention, "attend")
    parallel = type(layer) is not Layer
    if ("attn_out" in names) if parallel else ("residual" in names):
        recorder.wrap(attention.out, "forward")
        recorder.wrap(*((layer.attention_output, "forward") if parallel else (layer, "join")))
    elif "mlp_norm" in names and not isinstance(layer.mlp_input_norm, nn.Identity):
        if parallel:
            recorder.wrap(layer.mlp_input_norm, "forward")
        else:
            recorder.wrap_norm_of_sum(layer)
    _wrap_transformation(recorder, layer, names)


def _wrap_transformation(recorder: Recorder, layer: Layer, names: frozenset[str]) -> None:
    """The same for the feed-forward."""
    mlp = layer.mlp
    if isinstance(mlp, FeedForward):
        if "mlp_in" in names:
            recorder.wrap(mlp.up, "forward")
        if "mlp_out" in names:
            recorder.wrap(mlp.down, "forward")
            recorder.wrap(layer.mlp_output, "forward")
    elif "experts" in names:
        from megalite.model.moe import MixtureOfExperts

        assert isinstance(mlp, MixtureOfExperts)
        mlp.keeps_choice = True
        recorder.wrap(mlp, "forward")
        recorder.wrap(layer.mlp_output, "forward")


class Value:
    """A tensor that was dropped, or an input of an operation that is run again.

    Attributes:
        tensor: None while it is dropped.
        call: what computes it again.
    """

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, tensor: Tensor, call: OperationCall | None = None):
        self.tensor: Tensor | None = tensor
        self.call = call

    def get(self) -> Tensor:
        if self.tensor is None:
            assert self.call is not None
            self.call.run()
        assert self.tensor is not None, "an operation that is run again computes what it computed before"
        return self.tensor


class View(NamedTuple):
    """A tensor in the memory of a value, as the graph keeps it."""

    value: Value
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Value, tensor: Tensor) -> View:
        return cls(value, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


class Argument(NamedTuple):
    """A tensor argument of an operation, and whether it had a gradient: without one, autograd functions keep
    other tensors."""

    view: View
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.view.tensor().detach().requires_grad_(self.requires_grad)


class OperationCall:
    """One call of an operation, and the values that it computes. These are not held: what nobody needs any
    more is not computed for them.

    Attributes:
        outputs: by place among its outputs.
        saved: by place among the tensors that its autograd functions have saved.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self.function, self.arguments = function, arguments
        self.outputs: dict[int, ref[Value]] = {}
        self.saved: dict[int, ref[Value]] = {}

    def run(self) -> None:
        """Run the operation again, for all of its values, and let go of its arguments."""
        arguments = [each.tensor() if isinstance(each, Argument) else each for each in self.arguments]
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        # a graph for what it keeps, which no backward passes
        with torch.enable_grad(), saved_tensors_hooks(keep, saved.__getitem__):
            outputs = _tensors(self.function(*arguments))
        for found, values in ((outputs, self.outputs), (saved, self.saved)):
            for place, value in values.items():
                if (wanted := value()) is not None and wanted.tensor is None:
                    wanted.tensor = found[place].detach()
                    wanted.call = None
        self.arguments = ()


def _tensors(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class Recorder:
    """Runs a layer's forward, and drops what its wrapped operations compute and keep.

    While the layer runs all of it exists, as it does again in the layer's backward.

    Attributes:
        wrapped: number of operations that are dropped.
    """

    def __init__(self, layer: Layer):
        self.layer, self.wrapped = layer, 0
        self._values: dict[int, Value] | None = None  # by storage, while the layer runs

    def run(self, x: Tensor, state: ForwardState) -> Tensor:
        self._values = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                return self.layer.compute(x, state)
        finally:
            for value in self._values.values():
                if value.call is not None:
                    value.tensor = None
            self._values = None

    def wrap(self, owner: Any, name: str) -> None:
        """Replace an operation, a method of a module, by one that is recorded while the layer runs in
        training."""
        function = getattr(owner, name)
        setattr(owner, name, lambda *arguments: self._recorded(function, arguments))
        self.wrapped += 1

    def wrap_norm_of_sum(self, layer: Layer) -> None:
        """Drop only the norm's output of `join`, which is fused with the sum: it is computed from the sum
        again."""
        join = layer.join

        def recorded(*arguments: Any) -> tuple[Tensor, Tensor]:
            total, normed = join(*arguments)
            if self._values is not None:
                call = OperationCall(layer.mlp_input_norm, (self._argument(total),))
                call.outputs[0] = ref(self._put(normed, call))
            return total, normed

        layer.join = recorded  # type: ignore[method-assign, assignment]
        self.wrapped += 1

    def _recorded(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._values is None:  # the layer does not run in training
            return function(*arguments)
        call = OperationCall(
            function, tuple(self._argument(each) if isinstance(each, Tensor) else each for each in arguments)
        )
        places = count()

        def pack(tensor: Tensor) -> View:
            place, value = next(places), self._find(tensor)
            if value is None:
                value = self._put(tensor, call)
                call.saved[place] = ref(value)
            return View.of(value, tensor)

        with saved_tensors_hooks(pack, _unpack):
            outputs = function(*arguments)
        for place, tensor in enumerate(_tensors(outputs)):
            if self._find(tensor) is None:
                call.outputs[place] = ref(self._put(tensor, call))
        return outputs

    def _find(self, tensor: Tensor) -> Value | None:
        assert self._values is not None
        return self._values.get(tensor.untyped_storage()._cdata)

    def _put(self, tensor: Tensor, call: OperationCall | None) -> Value:
        assert self._values is not None
        value = self._values[tensor.untyped_storage()._cdata] = Value(tensor.detach(), call)
        return value

    def _argument(self, tensor: Tensor) -> Argument:
        value = self._find(tensor) or self._put(tensor, None)
        return Argument(View.of(value, tensor), tensor.requires_grad)

    def _pack(self, tensor: Tensor) -> View | Tensor:
        """Of what other operations keep, the outputs of dropped ones are dropped."""
        value = self._find(tensor)
        return tensor.detach() if value is None else View.of(value, tensor)


def _unpack(kept: View | Tensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()
