"""Activation checkpointing: a layer's backward recomputes activations that its forward does not keep.

`full` keeps a layer's input, and runs its whole forward again. Otherwise a set of operations is recomputed
(`config.recompute` names them, `planner.budget` chooses them): the forward runs once and builds its graph as
usual, but the graph keeps a `Value` in place of each tensor of these operations. The first backward that
needs one runs the operation again from its inputs, which may be such values themselves. Each operation runs
at most once more, and only dropped tensors are recomputed; the backward itself does not differ from a
layer that keeps all activations.

The second run repeats the communication of the first, in the order of the backward, which is the same on
every rank that takes part, and computes the same dropout masks, which depend only on their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.config.recompute import operations_of
from megalite.model.block_module import Operation
from megalite.model.cost.recomputed import NORM_OPERATIONS, OUTPUT_OPERATIONS, SUM_OPERATION, joins_sum
from megalite.model.forward_state import ForwardState
from megalite.model.kinds import KINDS
from megalite.model.layer import Layer

Run = Callable[[Tensor, ForwardState], Tensor]


def recomputing(layer: Layer, mode: str, exchanged: bool) -> Run | None:
    """Return the function that runs a layer's forward in training under a mode of train.recompute.

    None stands for the layer's own `compute`.

    Args:
        exchanged: whether attention keeps the tensors that it has exchanged over cp (Ulysses), not its
            inputs. Recomputing the projection and attention then saves memory only together.
    """
    if mode == "full":
        return lambda x, state: _Recompute.apply(x, layer, state)
    names = operations_of(mode)
    if exchanged and not names.issuperset(("qkv", "attention")):
        names -= {"qkv", "attention"}
    dropped, norms = _chosen(layer, names)
    if not dropped and not norms:
        return None
    recorder = Recorder(layer, dropped, norms)
    layer.by_operation.call_through(recorder.call)
    layer.nodes = []
    return recorder.run


def _chosen(layer: Layer, names: Container[str]) -> tuple[set[Operation], dict[Operation, Operation]]:
    """Return the operations of a layer that names of `train.recompute` stand for.

    The second part has sums of which only the norm is recomputed: the sum → its norm.
    """
    chosen: set[Operation] = set()
    norms: dict[Operation, Operation] = {}
    first = layer.placed[0]
    if NORM_OPERATIONS[first.spec.slot] in names:
        chosen.add(first.input_norm)
    for before, block, join in layer.by_operation.following:
        norm = NORM_OPERATIONS[block.spec.slot] in names and block.spec.input_norm is not None
        if block.spec.beside:
            joins = KINDS[before.spec.kind].joins_output
            if joins and OUTPUT_OPERATIONS.get(before.spec.slot) in names:
                chosen |= {before.block.last, before.output}
            if norm:
                chosen.add(block.input_norm)
        elif joins_sum(before.spec) and SUM_OPERATION in names:
            chosen |= {before.block.last, join}
        elif norm:
            norms[join] = block.input_norm
    for block in layer.placed:
        own = {each for name, each in block.block.operations().items() if name in names}
        chosen |= {*own, block.output} if block.block.last in own else own
    return chosen, norms


class _Recompute(torch.autograd.Function):
    """Keeps only a layer's input, and runs its forward again in backward.

    It also keeps the rows that an indexer of the layer has selected: the second forward and later layers find
    them in the state. The inner backward adds weight gradients to their buckets.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, state: ForwardState) -> Tensor:
        ctx.layer, ctx.state = layer, state
        out = layer.compute(x, state)
        selected = state.selections.get(layer.placed[0].spec.layer)
        ctx.save_for_backward(x, *(() if selected is None else (selected,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x = ctx.saved_tensors[0]
        inputs = x.detach().requires_grad_()  # a leaf: the inner backward ends here
        with torch.enable_grad():  # off inside a backward
            out = ctx.layer.compute(inputs, ctx.state)
        torch.autograd.backward(out, grads[0])
        return inputs.grad, None, None


class Value:
    """A tensor that was dropped, or an input of an operation that is run again.

    Attributes:
        tensor: None while it is dropped.
        call: the call that recomputes it.
    """

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, tensor: Tensor, call: OperationCall | None = None):
        self.tensor: Tensor | None = tensor
        self.call = call

    def get(self) -> Tensor:
        if self.tensor is None:
            assert self.call is not None
            self.call.run()
        assert self.tensor is not None, "an operation that is run again computes the same tensors"
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
    """A tensor argument of an operation.

    `requires_grad` is kept because it decides which tensors autograd functions save.
    """

    view: View
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.view.tensor().detach().requires_grad_(self.requires_grad)


class OperationCall:
    """Call of an operation.

    It has weak references to the values that it computes, so that values that the graph no longer holds are
    not recomputed.

    Attributes:
        outputs: values by index among its outputs.
        saved: values by index among the tensors that its autograd functions have saved.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self.function, self.arguments = function, arguments
        self.outputs: dict[int, ref[Value]] = {}
        self.saved: dict[int, ref[Value]] = {}

    def run(self) -> None:
        """Run the operation again for all of its values, and release its arguments."""
        arguments = [value.tensor() if isinstance(value, Argument) else value for value in self.arguments]
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        # a graph, which has no backward, for the tensors that autograd functions save
        with torch.enable_grad(), saved_tensors_hooks(keep, saved.__getitem__):
            outputs = _tensors(self.function(*arguments))
        _fill(self.outputs, outputs)
        _fill(self.saved, saved)
        self.arguments = ()


def _fill(references: dict[int, ref[Value]], tensors: list[Tensor]) -> None:
    """Restore the dropped values that still exist."""
    for place, reference in references.items():
        value = reference()
        if value is not None and value.tensor is None:
            value.tensor = tensors[place].detach()
            value.call = None


def _tensors(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class Recorder:
    """Runs a layer's forward and then drops the tensors that chosen operations have computed and saved.

    Args:
        dropped: the operations whose tensors are dropped.
        norms: sums of which only the norm is dropped, and that norm.
    """

    def __init__(self, layer: Layer, dropped: set[Operation], norms: dict[Operation, Operation]):
        self.layer, self._dropped, self._norms = layer, dropped, norms
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

    def call(self, operation: Operation, *arguments: Any) -> Any:
        """Call an operation of the layer, and record it if its tensors are dropped."""
        if self._values is None:  # the layer does not run in training
            return operation(*arguments)
        if operation in self._dropped:
            return self._recorded(operation, arguments)
        outputs = operation(*arguments)
        if operation in self._norms:
            self._drop_norm(self._norms[operation], *outputs)
        return outputs

    def _drop_norm(self, norm: Operation, total: Tensor, normed: Tensor) -> None:
        """Drop only the norm that an operation computes fused with a sum.

        It is recomputed from the sum.
        """
        call = OperationCall(norm, (self._argument(total),))
        call.outputs[0] = ref(self._put(normed, call))

    def _recorded(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        views = (self._argument(value) if isinstance(value, Tensor) else value for value in arguments)
        call = OperationCall(function, tuple(views))
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
        """Pack a tensor that another operation saves: recorded outputs are dropped there, too."""
        value = self._find(tensor)
        return tensor.detach() if value is None else View.of(value, tensor)


def _unpack(packed: View | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()
