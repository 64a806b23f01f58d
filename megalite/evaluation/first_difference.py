"""Where a model first differs from the same model in transformers, in the order of the forward.

Each part computes on the input that transformers gives to the same part, so that a difference in one part is
none in the parts after it. Compared are the embedding, the layers and the head; in the first of these that
differs its norms and blocks; in the first block that differs what its last matmul reads.

Only one of the two models is in memory at a time: transformers runs first, and the inputs and outputs of its
modules are kept. A module that has no counterpart is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.evaluation.logits import arithmetic_in, inputs_of, load_stage, load_transformers
from megalite.generation.sources import ModelSource
from megalite.huggingface.source import HuggingFaceSource
from megalite.huggingface.tensor_places import TensorPlace
from megalite.model.kinds import KINDS
from megalite.model.layer import Layer, PlacedBlock
from megalite.model.stage import Stage
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.node import Chain
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm
from megalite.parallel.weight import Weight
from megalite.system.progress import Report, silent
from megalite.system.text import abbreviated

PRECISIONS = {"float32": "fp32", "float64": "fp64"}
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
"""Largest differences, relative to the norm of transformers' tensor, that rounding in one part explains."""
TOKENS = 128


@dataclass(frozen=True)
class Suspect:
    """The first part that differs.

    Attributes:
        place: a tensor or a module of the Hugging Face model.
        error: relative to the norm of transformers' output.
        reason: what was compared.
    """

    place: str
    error: float
    reason: str

    @property
    def line(self) -> str:
        return f"first suspect: {self.place}: {self.reason}, by {self.error:.1e}"


class _ModuleRun(NamedTuple):
    """The first input and output of a module of transformers."""

    x: Tensor
    y: Tensor


def first_difference(
    source: ModelSource,
    hf: Path,
    *,
    texts: Sequence[str],
    tokens: int,
    rows: int,
    dtype: str = "float32",
    progress: Report = silent,
) -> Suspect | None:
    """Compare on a row of the last input of `logits.compare`, in float32 or float64. Returns None if no part
    differs.

    Raises:
        CheckpointError, ConfigError: one of the two cannot be loaded.
    """
    *_, ids = (ids[0, :TOKENS] for ids in inputs_of(source, hf, texts, tokens, rows).values())
    places = HuggingFaceSource.of(hf, mtp=False).places
    with arithmetic_in(getattr(torch, dtype)):
        runs, logits = _their_runs(hf, places, ids, getattr(torch, dtype), progress)
    progress(f"opening {source.name}")
    stage = load_stage(source, PRECISIONS[dtype])
    with torch.no_grad():
        return _Comparison(stage, places, runs, logits, ids, BOUNDS[dtype]).first()


# ---- transformers


def _their_runs(
    hf: Path, places: dict[str, TensorPlace], ids: Tensor, dtype: torch.dtype, progress: Report
) -> tuple[dict[str, _ModuleRun], Tensor]:
    """Return the inputs and outputs of the modules that `places` names, and of those around them, by their
    names in the file, and the logits."""
    model, runs = load_transformers(hf, dtype, progress).to(dtype), dict[str, _ModuleRun]()
    tensors = [name.split(".") for place in places.values() for name in place.tensors]
    wanted = {".".join(parts[:end]) for parts in tensors for end in range(1, len(parts))}

    def watch(path: str, module: Any) -> None:
        def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
            inputs = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
            y = out[0] if isinstance(out, tuple) else out
            if inputs and isinstance(y, Tensor):
                runs.setdefault(path, _ModuleRun(inputs[0].detach().clone(), y.detach().clone()))

        module.register_forward_hook(hook, with_kwargs=True)

    for name, module in model.named_modules():
        # a file and a loaded model may have different names for what is around the layers
        alike = (each for each in wanted if _alike(name, each))
        path = name if name in wanted else next(alike, None)
        if path is not None:
            watch(path, module)
    progress("a forward pass of transformers")
    with torch.no_grad():
        return runs, model(input_ids=ids.unsqueeze(0), use_cache=False).logits


def _alike(one: str, other: str) -> bool:
    """Return whether two paths of modules are the same but for their beginning."""
    if one.endswith(f".{other}") or other.endswith(f".{one}"):
        return True
    tail = one.partition(".")[2]
    return bool(tail) and tail == other.partition(".")[2]


# ---- megalite


class _Comparison:
    """Compares the parts of a stage that is a whole model.

    Args:
        places: our tensor → its place in the file.
        runs: what modules of transformers have read and returned, by their names in the file.
        logits: theirs, [1, tokens, vocabulary].
        ids: [tokens].
    """

    def __init__(
        self,
        stage: Stage,
        places: dict[str, TensorPlace],
        runs: dict[str, _ModuleRun],
        logits: Tensor,
        ids: Tensor,
        bound: float,
    ):
        assert stage.head is not None
        self.stage, self.head, self.places, self.runs = stage, stage.head, places, runs
        self.logits, self.tokens, self.bound = logits, ids.unsqueeze(1), bound
        # of mup, which transformers has in the last matrix of a block, or in the norm of its output
        self.depth_factor = 1.0 / stage.model_config.depth_growth
        microbatch = Microbatch.of(self.tokens, self.tokens, torch.zeros(1, dtype=torch.int64))
        self.state = stage.forward_state(microbatch, step=0, training=False)

    def first(self) -> Suspect | None:
        layers = [layer for layer in self.stage.layers.values() if isinstance(layer, Layer)]
        names = [self._module(f"layers.{number}.") for number in range(len(layers))]
        suspect, differing = self._of_embedding(self.runs.get(names[0])), 0
        for layer, name in zip(layers, names, strict=True):
            if (run := self.runs.get(name)) is None:
                continue
            difference = self._differs(layer(_columns(run.x), self.state), _columns(run.y))
            if difference is not None:
                differing += 1
                suspect = suspect or self._in_layer(layer, name, difference)
        if differing:
            assert suspect is not None
            return replace(suspect, reason=f"{suspect.reason} ({differing} of {len(layers)} layers differ)")
        return suspect or self._of_head(self.runs.get(names[-1]))

    def _of_embedding(self, run: _ModuleRun | None) -> Suspect | None:
        embedding = self.stage.embedding
        if run is None or embedding is None:
            return None
        positions = self.state.document_positions if embedding.positions is not None else None
        difference = self._differs(embedding(self.tokens, positions), _columns(run.x))
        place = self._files("embedding.weight")[0]
        return difference and difference.at(place, "the input of the first layer differs")

    def _of_head(self, last: _ModuleRun | None) -> Suspect | None:
        norm = self.head.norm
        suspect = next(self._of_norms(norm.operations if isinstance(norm, Chain) else [norm]), None)
        if suspect is not None or last is None:
            return suspect
        ours = self.head.logits(_columns(last.y))[..., : self.logits.shape[-1]]
        difference = self._differs(ours, _columns(self.logits))
        place = self._files(self.head.project.weight.spec.segments[0].name)[0]
        return difference and difference.at(place, "on the same output of the last layer, logits differ")

    def _in_layer(self, layer: Layer, name: str, difference: _Difference) -> Suspect:
        for placed in layer.placed:
            before, after = [placed.input_norm], placed.output.operations
            inside = vars(placed.block).values()
            for suspect in (
                next(self._of_norms((*before, *inside)), None),
                self._of_block(placed, name),
                next(self._of_norms(after, self.depth_factor), None),
            ):
                if suspect is not None:
                    return suspect
        if any(self._run_of(placed, name) is None for placed in layer.placed):
            return difference.at(name, "on the same input, its output differs")
        return difference.at(name, "its norms and blocks agree on the same inputs, but their sum differs")

    def _run_of(self, placed: PlacedBlock, layer: str) -> _ModuleRun | None:
        """Return the run of the module that has all tensors of a block; None if there is none, or factors
        that ours has on the output have other places in it."""
        path, kind = self._module(f"{placed.spec.name}."), KINDS[placed.spec.kind]
        alike = path != layer and kind.output_factor(self.stage.model_config) == 1.0
        return self.runs.get(path) if alike else None

    def _of_norms(self, candidates: Iterable[Any], factor: float = 1.0) -> Iterator[Suspect]:
        """Yield the differences of norms among the candidates, which theirs have times a factor."""
        for norm in candidates:
            if not isinstance(norm, RMSNorm | LayerNorm) or not isinstance(norm.weight, Weight):
                continue
            name = norm.weight.spec.segments[0].name
            run, order = self.runs.get(self._module(name)), list(self.places[name].rows)
            if run is None or run.x.shape != run.y.shape or run.x.shape[-1] != len(order):
                continue
            difference = self._differs(factor * norm(run.x[..., order]), run.y[..., order])
            if difference is not None:
                yield difference.at(self._files(name)[0], "on the same input, this norm's output differs")

    def _of_block(self, placed: PlacedBlock, layer: str) -> Suspect | None:
        """Return the difference of a block from the module that has all its tensors."""
        prefix, block, run = f"{placed.spec.name}.", placed.block, self._run_of(placed, layer)
        if run is None:
            return None
        path = self._module(prefix)
        call, last, read = block.call, block.last, list[Tensor]()

        def watching(operation: Any, *arguments: Any) -> Any:
            if operation == last:
                read.append(arguments[0])
            return call(operation, *arguments)

        block.call = watching
        factor = 1.0 if placed.spec.output_norm else self.depth_factor
        difference = self._differs(factor * block(_columns(run.x), self.state), _columns(run.y))
        block.call = call
        if difference is None:
            return None
        weight = getattr(last, "weight", None)
        name = weight.spec.segments[0].name if isinstance(weight, Weight) else ""
        multiplies = self._module(name) if name else path
        behind = self.runs.get(multiplies)
        if not read or behind is None or multiplies == path:
            return difference.at(path, "on the same input, its output differs")
        activation = getattr(last, "activation", None)
        earlier = self._differs(
            read[0] if activation is None else activation.forward(read[0]), _columns(behind.x)
        )
        inside = {self._module(name).removeprefix(f"{path}."): None for name in self._names(prefix)}
        short = multiplies.removeprefix(f"{path}.")
        if earlier is None:
            return difference.at(multiplies, "on the same input, its output differs")
        before = abbreviated([module for module in inside if module not in (short, path)], 4)
        return earlier.at(f"{path} ({before})", f"on the same input, that of {short} differs")

    def _differs(self, ours: Tensor, theirs: Tensor) -> _Difference | None:
        """Compare tensors whose first dimension has the positions."""
        if ours.shape != theirs.shape:
            return None
        error, norm = (ours - theirs).double(), theirs.double().norm()
        relative = float(error.norm() / norm.clamp(min=1e-30))
        if relative <= self.bound:
            return None
        by_position = error.flatten(1).norm(dim=1) * len(error) ** 0.5 / norm
        beyond = (~(by_position <= self.bound)).nonzero()
        return _Difference(relative, int(beyond[0]) if len(beyond) else 0)

    def _files(self, *names: str) -> list[str]:
        """Return the tensors of the file that have ours."""
        return [theirs for name in names if name in self.places for theirs in self.places[name].tensors]

    def _module(self, *prefixes: str) -> str:
        """Return the module of the file that has all of our tensors with these names, or beginnings of names
        that end with a dot."""
        paths = [theirs.split(".")[:-1] for theirs in self._files(*self._names(*prefixes))]
        return ".".join(commonprefix(paths))

    def _names(self, *prefixes: str) -> list[str]:
        return [name for name in self.places if name.startswith(prefixes)]


class _Difference(NamedTuple):
    """How much two tensors differ, and the first position that does."""

    error: float
    position: int

    def at(self, place: str, reason: str) -> Suspect:
        since = f" from position {self.position} on" if self.position else ""
        return Suspect(place, self.error, f"{reason}{since}")


def _columns(x: Tensor) -> Tensor:
    """[1, tokens, …] -> [tokens, 1, …], and back."""
    return x.transpose(0, 1).contiguous()
