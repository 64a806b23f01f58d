"""A device's rules for tensors in CPU memory: finds what makes the host wait for a device, on a machine that has none.

Each storage has a kind. A tensor is on the device if it was created with DEVICE, was moved there, or was computed from
one that is. It then says so (`device`, `is_cpu`), so that code takes the way that it takes on a GPU. What is not known
to be elsewhere is ordinary host memory. Within `DeviceRules` these are faults (`faults`):

    the host reads a value or a size from a tensor on the device: item, tolist, cpu, nonzero, an index by a mask …
    a tensor is moved to the device from memory that is not pinned, or meets one there without having been moved
    a value is read from pinned memory before an event after its copy has been waited for

A wait for an event is no fault; `waits` has for each the operations that were queued between the event and the wait,
after ASIDE if the event is on a stream of its own. Streams do not run in another order than the host, and copies are
done at once: what is checked is who waits for whom, not whether streams wait for each other where they must.

Kinds are kept by storage, not in a subclass of Tensor: real tensors go through autograd, custom functions, gloo and
views as they do without the rules. Nothing is freed as long as the rules hold, so that an address is not used twice.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megalite_kernels
import torch
from megalite_kernels import grouped_weight_grad
from megalite_kernels.groups import Groups
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megalite.config.load import from_dict
from megalite.parallel.collectives import Work
from megalite.system import pinned_memory
from megalite.system.shared_memory import SharedMemory
from megalite.training.trainer import Trainer
from tests.support.jobs import mesh_of

DEVICE = torch.device("cpu", 0)  # unlike torch.device("cpu"), which is the host
ASIDE = "on a stream of its own"
ON_DEVICE, HOST, PINNED, EITHER = "on the device", "in pageable memory", "pinned", "a constant"

READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "masked_scatter"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "histc", "multinomial"),
}
HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class _Stream:
    """behind: whether it has waited for another stream, so that a wait for it may be one for that stream."""

    def __init__(self, rules: DeviceRules):
        self.rules, self.behind = rules, False

    def record_event(self) -> _Event:
        return _Event(self)

    def wait_event(self, event: _Event) -> None:
        self.behind = True

    def wait_stream(self, stream: _Stream) -> None:
        self.behind = True


class _Event:
    def __init__(self, stream: _Stream):
        self._stream, self._at, self._copies = stream, len(stream.rules.queued), set(stream.rules.in_flight)

    def synchronize(self) -> None:
        rules, stream = self._stream.rules, self._stream
        own_stream = stream is not rules.compute and not stream.behind
        rules.waits.append(([ASIDE] if own_stream else []) + rules.queued[self._at :])
        rules.in_flight -= self._copies


class DeviceRules(AbstractContextManager["DeviceRules"]):
    """Within it the rules hold. Tensors that exist at its start are on the device, but for what `placed` returns.

    Attributes:
        faults: what broke a rule, and where.
        waits: for each event that was waited for, what was queued meanwhile.
        queued: the operations on the device.
        in_flight: the storages that are being copied to pinned memory.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: list[list[str]] = []
        self.queued: list[str] = []
        self.in_flight: set[int] = set()
        self.compute = self.stream = _Stream(self)
        self._kinds: dict[int, tuple[Any, str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> DeviceRules:
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):  # isinstance would wake what is lazy
                self.place(each, ON_DEVICE)
        functions, run_backward = _Functions(self), torch.autograd._engine_run_backward

        def backward(*args: Any, **options: Any) -> Any:
            with functions:  # a mode is off inside the functions that it handles, `backward` among them
                return run_backward(*args, **options)

        changes = (
            patch.object(torch.autograd, "_engine_run_backward", backward),
            *self._patches(),
            functions,
            _Operations(self),
        )
        for change in changes:
            self._stack.enter_context(change)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _patches(self) -> Iterator[AbstractContextManager[Any]]:
        """Streams; communication, which reads what it sends as it likes; and the one kernel whose reference reads
        sizes."""
        yield patch.object(torch.cuda, "current_stream", lambda device=None: self.stream)
        yield patch.object(torch.cuda, "Stream", lambda device=None, priority=0: _Stream(self))
        yield patch.object(torch.cuda, "stream", self._with_stream)
        yield patch.object(pinned_memory, "side_stream", cache(pinned_memory.side_stream.__wrapped__))
        yield patch.object(Work, "__init__", _unwatched(Work.__init__))
        yield patch.object(Work, "wait", _unwatched(Work.wait))
        yield patch.object(SharedMemory, "publish", _unwatched(SharedMemory.publish))
        yield patch.object(SharedMemory, "peers", self.placed(SharedMemory.peers, ON_DEVICE))
        yield patch.object(grouped_weight_grad, "takes_triton", lambda x: not x.is_cpu)
        yield patch.object(megalite_kernels, "grouped_weight_grad_triton", _Kernel, create=True)

    @contextmanager
    def _with_stream(self, stream: _Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    # ---- kinds

    def kind(self, x: Tensor) -> str:
        _, kind = self._kinds.get(x.untyped_storage()._cdata, (None, HOST))
        return kind

    def place(self, x: Tensor, kind: str) -> Tensor:
        if x.layout == torch.strided and not x.is_meta:
            storage = x.untyped_storage()
            self._kinds[storage._cdata] = storage, kind
        return x

    def placed(self, act: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """`act` without the rules, its tensors placed in one kind of memory."""

        @wraps(act)
        def placing(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                result = act(*args, **options)
                for each in _tensors(result):
                    self.place(each, kind)
            return result

        return placing

    def fault(self, what: str) -> None:
        places, frame = list[str](), sys._getframe(1)
        while frame.f_back is not None and len(places) < 3:
            file = Path(frame.f_code.co_filename)
            if {"megalite", "megalite_kernels"} & {*file.parts} and not {"tests", "site-packages"} & {*file.parts}:
                places.append(f"{file.name}:{frame.f_code.co_name}")
            frame = frame.f_back
        self.faults.append(f"{what} ({' < '.join(places)})")


def watched(trainer: Trainer) -> DeviceRules:
    """The rules' records of the third step of a trainer on DEVICE, which is closed.

    The first step allocates what is kept; under optimistic steps the third is the first to learn of a step that did not
    wait.
    """
    rules = DeviceRules()
    with patch.object(trainer.loader, "step", rules.placed(trainer.loader.step, HOST)), rules:
        for _ in range(2):
            trainer.train_step()
        for record in (rules.faults, rules.waits):
            record.clear()
        trainer.train_step()
        records = rules.faults[:], rules.waits[:]
        trainer.close()
    rules.faults, rules.waits = records
    return rules


def waits(context: Any, config: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A job: the faults of a step, and the operations that were queued while the host waited for each event."""
    parsed = from_dict(config)
    rules = watched(Trainer(parsed, mesh_of(context, parsed), DEVICE))
    return rules.faults, rules.waits


class _Kernel:
    """Replaces the kernel that reads the experts' numbers of rows on the device."""

    @staticmethod
    def add_grouped_gradient(grad: Tensor, left: Tensor, right: Tensor, ends: Tensor, overwrite: bool) -> None:
        with _disable_current_modes():
            groups = Groups(ends.diff(prepend=ends.new_zeros(1)).long())
            pairs = zip(groups.split(left), groups.split(right), strict=True)
            matmuls = torch.stack([a.t().float() @ b.float() for a, b in pairs])
            grad.copy_(matmuls if overwrite else grad + matmuls)


def _unwatched(act: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(act)
    def unwatched(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return act(*args, **options)

    return unwatched


def _tensors(*values: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples, dictionaries and attributes of objects."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(*each)
        elif isinstance(each, dict) or hasattr(each, "__dict__"):
            yield from _tensors(*(each if isinstance(each, dict) else vars(each)).values())


class _Functions(TorchFunctionMode):
    """Functions that do not reach the dispatcher on a CPU: properties, and moves between host and device."""

    def __init__(self, rules: DeviceRules):
        super().__init__()
        self.rules = rules

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rules, options = self.rules, dict(kwargs or {})
        if args and isinstance(args[0], Tensor):
            result = self._of_tensor(function, args[0], args[1:], options)
            if result is not NotImplemented:
                return result
        device = options.get("device")
        pinned = options.pop("pin_memory", False)
        result = function(*args, **options)
        if pinned:
            rules.place(result, PINNED)
        elif is_device(device) and isinstance(result, Tensor):
            if function in (torch.tensor, torch.as_tensor):
                rules.fault(f"torch.{function.__name__} with device uploads from pageable memory")
            if rules.kind(result) in (HOST, EITHER):
                rules.place(result, ON_DEVICE)
        return result

    def _of_tensor(self, function: Any, x: Tensor, others: tuple[Any, ...], options: dict[str, Any]) -> Any:
        rules, kind = self.rules, self.rules.kind(x)
        if function == torch.Tensor.device.__get__:
            return DEVICE if kind == ON_DEVICE else torch.device("cpu")
        if function == torch.Tensor.is_cpu.__get__:
            return kind != ON_DEVICE
        if function is torch.Tensor.is_pinned:
            return kind == PINNED
        if function is torch.Tensor.pin_memory:
            return x if kind == PINNED else rules.place(_copy(x), PINNED)
        if function in HOST_READS:
            self._read(x, function.__name__)
            return function(rules.place(_copy(x), HOST), *others, **options)
        if function is torch.Tensor.to:
            return self._moved(x, kind, others, options)
        return NotImplemented

    def _moved(self, x: Tensor, kind: str, others: tuple[Any, ...], options: dict[str, Any]) -> Any:
        targets = [each for each in (*others, options.get("device")) if isinstance(each, torch.device | str | Tensor)]
        target = targets[0] if targets else None
        if isinstance(target, Tensor):
            target = DEVICE if self.rules.kind(target) == ON_DEVICE else torch.device("cpu")
        if target is None or (kind == ON_DEVICE) == is_device(target):
            return NotImplemented
        if kind == ON_DEVICE:
            self._read(x, "to(cpu)")
            return self.rules.place(_copy(x).to(*others, **options), HOST)
        if kind != PINNED or not options.get("non_blocking"):
            self.rules.fault(f"to(device) of a tensor {kind}, non_blocking={options.get('non_blocking', False)}")
        return self.rules.place(_copy(x).to(*others, **options), ON_DEVICE)

    def _read(self, x: Tensor, name: str) -> None:
        if self.rules.kind(x) == ON_DEVICE:
            self.rules.fault(f"{name} of a tensor on the device")
        elif x.untyped_storage()._cdata in self.rules.in_flight:
            self.rules.fault(f"{name} of a tensor that is still being copied from the device")


def is_device(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _copy(x: Tensor) -> Tensor:
    with _disable_current_modes():
        return x.clone()


class _Operations(TorchDispatchMode):
    """Operations of the dispatcher, in backward too: kinds of results, reads, and tensors on different devices."""

    def __init__(self, rules: DeviceRules):
        super().__init__()
        self.rules = rules

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else torch imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rules, options = self.rules, dict(kwargs or {})
        name = function.overloadpacket.__name__
        given = [*_tensors(args, options)]
        kinds = {rules.kind(each) for each in given}
        if name == "copy_":
            self._check_copy(args, options)
        elif ON_DEVICE in kinds:
            self._check(name, args, options, given)
        elif any(each.untyped_storage()._cdata in rules.in_flight for each in given):
            rules.fault(f"{name} of a tensor that is still being copied from the device")
        results = function(*args, **options)
        if ON_DEVICE in kinds:
            rules.queued.append(name)
        result = ON_DEVICE if ON_DEVICE in kinds else HOST if HOST in kinds else PINNED if PINNED in kinds else EITHER
        for each in _tensors(results):
            if each.untyped_storage()._cdata not in rules._kinds or rules.kind(each) == EITHER:
                rules.place(each, result)
        return results

    def _check(self, name: str, args: Any, options: dict[str, Any], given: list[Tensor]) -> None:
        rules = self.rules
        sizes_unknown = name == "repeat_interleave" and options.get("output_size") is None
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in READS or sizes_unknown or by_mask:
            rules.fault(f"{name}{' by a mask' if by_mask else ''} of a tensor on the device")
        if any(each.dim() and rules.kind(each) in (HOST, PINNED) for each in given):
            rules.fault(f"{name} of tensors on the device and {HOST}")

    def _check_copy(self, args: Any, options: dict[str, Any]) -> None:
        rules, (into, source, *others) = self.rules, args
        kinds = rules.kind(into), rules.kind(source)
        if kinds[0] == EITHER:
            rules.place(into, kinds[1])
        waits = not (others[0] if others else options.get("non_blocking", False))
        if kinds == (PINNED, ON_DEVICE):
            rules.in_flight.add(into.untyped_storage()._cdata)
        if kinds in ((PINNED, ON_DEVICE), (ON_DEVICE, PINNED)) and waits:
            rules.fault("copy_ between pinned memory and the device, without non_blocking")
        elif kinds in ((HOST, ON_DEVICE), (ON_DEVICE, HOST)) and source.dim() + into.dim():
            rules.fault(f"copy_ between the device and a tensor {HOST}")
