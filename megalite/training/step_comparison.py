"""Comparison of optimizer steps from given weights with transformers and torch's AdamW, tensor by tensor.

Both sides start from the same weights, train on the same tokens in one process and one dtype, and use AdamW
with the same settings. Compared are the weights at the start, the loss of every step, the gradient of every
tensor in the first step, and every tensor after the last step.

transformers runs first. It writes its tensors with `save_pretrained`, which gives them their names and shapes
in files; they are then read as an import reads them. Only one of the two models is in memory at a time.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.data.preparation.writer import IndexedWriter
from megalite.evaluation.first_difference import Suspect
from megalite.evaluation.logits import arithmetic_in, encode, load_transformers
from megalite.generation.sources import ModelSource
from megalite.huggingface.config_json import without_training_options
from megalite.huggingface.files import ConversionError
from megalite.huggingface.source import HuggingFaceSource
from megalite.huggingface.tensor_places import TensorPlace
from megalite.model.mtp.losses import without_further_losses
from megalite.model.parameters import weight_shapes
from megalite.system.progress import Report, silent
from megalite.system.text import abbreviated
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors

LEARNING_RATE, BETAS = 1e-3, (0.9, 0.95)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRECISIONS = {"float32": "fp32", "float64": "fp64"}
FLOOR = 1e-2
"""Errors are relative to the norm of a tensor, or to this share of the largest norm of its kind if that is
larger: some gradients, as those of the biases of keys, are zero but for rounding."""
SEED = 0
WORST, MOST = 5, 40  # tensors that are listed: without and with differences beyond the bound


@dataclass(frozen=True)
class StepBounds:
    """Largest relative errors that rounding in a dtype explains.

    Attributes:
        gradient: of losses and gradients.
        weight: of weights, at the start and after the steps.
    """

    gradient: float
    weight: float


BOUNDS = {"float32": StepBounds(1e-4, 1e-5), "float64": StepBounds(1e-9, 1e-10)}


def _finite(value: float) -> float:
    """Return the value, or the largest float for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else sys.float_info.max


@dataclass(frozen=True)
class TensorError:
    """The relative error of a tensor in the file, or of our part of it."""

    tensor: str
    error: float


@dataclass(frozen=True)
class TensorErrors:
    """The errors of all tensors of one kind, the worst first.

    Attributes:
        kind: "weight at the start", "gradient" or "weight after the steps".
        bound: errors above it are not explained by rounding.
    """

    kind: str
    bound: float
    errors: list[TensorError]

    @cached_property
    def exceeding(self) -> list[TensorError]:
        return [each for each in self.errors if not each.error <= self.bound]


@dataclass(frozen=True)
class StepComparison:
    """The result for some optimizer steps.

    Attributes:
        losses: (ours, that of transformers) of each step.
        epsilon: of AdamW, on both sides.
    """

    dtype: str
    rows: int
    tokens: int
    epsilon: float
    losses: list[tuple[float, float]]
    tensors: list[TensorErrors]

    @property
    def loss_error(self) -> float:
        """The largest relative error of a loss."""
        return max(_finite(abs(ours - theirs) / max(abs(theirs), 1e-30)) for ours, theirs in self.losses)

    @property
    def equal(self) -> bool:
        within = self.loss_error <= BOUNDS[self.dtype].gradient
        return within and not any(each.exceeding for each in self.tensors)

    def lines(self) -> list[str]:
        """Return the lines for the terminal: the worst tensors of each kind, and all that exceed a bound."""
        bounds, steps = BOUNDS[self.dtype], len(self.losses)
        lines = [
            f"{steps} step{'s' * (steps > 1)} of AdamW in {self.dtype} on {self.rows} x {self.tokens} tokens "
            f"(learning rate {LEARNING_RATE:g}, betas {BETAS[0]:g} and {BETAS[1]:g}, epsilon "
            f"{self.epsilon:.2g}, no weight decay), relative differences:",
            f"  {self.loss_error:8.1e}  loss, {self.losses[0][1]:.6g} in the first step (bound "
            f"{bounds.gradient:g})",
        ]
        for each in self.tensors:
            shown = each.errors[: max(WORST, min(len(each.exceeding), MOST))]
            lines.append(f"{each.kind}, {len(each.errors)} tensors (bound {each.bound:g}), the worst:")
            lines += [f"  {error.error:8.1e}  {error.tensor}" for error in shown]
        beyond = sum(len(each.exceeding) for each in self.tensors)
        if self.equal:
            return [*lines, "equal within these bounds"]
        return [*lines, f"NOT equal: {beyond} differences of tensors exceed these bounds"]

    @property
    def converted_wrongly(self) -> Suspect | None:
        """The tensor whose weights at the start differ most, or None if they are equal."""
        start = self.tensors[0]
        if not start.exceeding:
            return None
        worst = start.exceeding[0]
        return Suspect(worst.tensor, worst.error, "its weights at the start differ")

    def as_json(self) -> dict[str, Any]:
        tensors = {each.kind: [asdict(error) for error in each.errors] for each in self.tensors}
        own = {"equal": self.equal, "dtype": self.dtype, "rows": self.rows, "tokens": self.tokens}
        optimizer = {"lr": LEARNING_RATE, "betas": BETAS, "eps": self.epsilon, "weight_decay": 0.0}
        bounds = asdict(BOUNDS[self.dtype])
        losses = [[_finite(ours), _finite(theirs)] for ours, theirs in self.losses]
        return own | {"optimizer": optimizer, "bounds": bounds, "losses": losses, "tensors": tensors}


def compare_steps(
    source: ModelSource,
    hf: Path,
    *,
    steps: int,
    dtype: str,
    texts: Sequence[str],
    tokens: int,
    rows: int,
    progress: Report = silent,
) -> StepComparison:
    """Train a model on one process for some steps on both sides.

    Args:
        source: our weights, a checkpoint or hf:DIR.
        hf: the directory that transformers loads.
        dtype: float32 or float64, of weights and arithmetic.
        texts: trained on one after another, again from the first one after the last. Without texts, random
            tokens.
        tokens: length of a row, at most the model's longest.
        rows: rows of a step.

    Raises:
        CheckpointError, ConfigError: one of the two cannot be loaded, or their models differ.
    """
    model = source.config.model
    length = min(tokens, model.max_position_embeddings)
    row = _tokens(texts, hf, model, steps * rows * length + 1)
    samples = [row[at : at + length + 1] for at in range(0, len(row) - 1, length)]
    batches = [torch.stack(samples[at : at + rows]) for at in range(0, len(samples), rows)]
    original = HuggingFaceSource.of(hf, mtp=False)
    _check_same_shapes(source, original)
    own_names = _names(original)
    with tempfile.TemporaryDirectory(prefix="megalite_check_") as scratch:
        directory = Path(scratch)
        losses, epsilon = _their_steps(hf, batches, DTYPES[dtype], directory, progress)
        config = _config(source, row, batches, dtype, epsilon, directory)
        own: list[float] = []
        compared = list(_our_steps(config, own_names, own, directory, dtype, progress))
    pairs = list(zip(own, losses, strict=True))
    return StepComparison(dtype, rows, length, epsilon, pairs, compared)


def _check_same_shapes(source: ModelSource, original: HuggingFaceSource) -> None:
    """Raise ConversionError if the two models differ in their tensors."""
    ours, theirs = (
        weight_shapes(model) for model in (without_further_losses(source.config.model), original.model)
    )
    if different := sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    ):
        raise ConversionError(
            f"{original.directory} does not match {source.name}: the shapes of "
            f"{abbreviated(different, 3)} differ"
        )


def _tokens(texts: Sequence[str], hf: Path, model: ModelConfig, count: int) -> Tensor:
    if not texts:
        return torch.randint(model.vocabulary, (count,), generator=torch.Generator().manual_seed(SEED))
    ids = torch.cat([encode(text, hf, model.vocabulary, count)[0] for text in texts])
    return ids.repeat(-(-count // len(ids)))[:count]


# ---- transformers


def _their_steps(
    hf: Path, batches: Sequence[Tensor], dtype: torch.dtype, directory: Path, progress: Report
) -> tuple[list[float], float]:
    """Train with transformers and write its tensors to start/, gradient/ and end/ of a directory.

    Returns:
        the losses, and AdamW's epsilon: the root mean square of the first gradient. A smaller one would
        amplify the rounding of small gradients.
    """
    losses, epsilon, optimizer = list[float](), 0.0, None
    with arithmetic_in(dtype):
        model = load_transformers(hf, dtype, progress).to(dtype)
        model.get_input_embeddings().padding_idx = None  # transformers would not train its row
        _write(model, model.state_dict(), directory / "start")
        for batch in batches:
            progress("steps of transformers", len(losses), len(batches), "steps")
            losses.append(_their_backward(model, batch, hf))
            if optimizer is None:
                epsilon = _write_gradients(model, directory / "gradient")
                optimizer = torch.optim.AdamW(
                    model.parameters(),
                    lr=LEARNING_RATE,
                    betas=BETAS,
                    eps=epsilon,
                    weight_decay=0.0,
                    fused=False,
                )
            optimizer.step()
            optimizer.zero_grad()
        _write(model, model.state_dict(), directory / "end")
    return losses, epsilon


def _their_backward(model: Any, batch: Tensor, hf: Path) -> float:
    """Return the loss of a batch [rows, tokens + 1], and add its gradients."""
    try:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConversionError(f"transformers failed to train the model in {hf}: {reason}") from error
    return float(loss.item())


def _write_gradients(model: Any, directory: Path) -> float:
    """Write the gradients of a model and return their root mean square."""
    tensors = model.state_dict(keep_vars=True)  # tied parameters are the same object
    gradients = {name: value.grad for name, value in tensors.items() if value.grad is not None}
    _write(model, {name: gradients.get(name, torch.zeros_like(tensors[name])) for name in tensors}, directory)
    own = {id(value): value for value in gradients.values()}.values()
    squares = sum(value.double().square().sum().item() for value in own)
    return max(math.sqrt(squares / sum(value.numel() for value in own)), 1e-30)


def _write(model: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    model.save_pretrained(directory, state_dict=tensors)


# ---- megalite


def _config(
    source: ModelSource,
    row: Tensor,
    batches: Sequence[Tensor],
    dtype: str,
    epsilon: float,
    directory: Path,
) -> Config:
    """Return the configuration of our steps: one process, no dropout, and no losses besides cross-entropy."""
    prefix, vocabulary = directory / "tokens", source.config.model.vocabulary
    with IndexedWriter(prefix, vocabulary) as writer:
        writer.add(row.numpy().astype(np.int64), [len(row)])
        writer.finish({"vocab_size": vocabulary, "eos": 0})
    model = replace(without_training_options(source.config.model), init_from=source.name)
    rows, length = batches[0].shape[0], batches[0].shape[1] - 1
    train = {"steps": len(batches), "global_batch_size": rows, "micro_batch_size": rows, "grad_clip": 0.0}
    optimizer = {"lr": LEARNING_RATE, "betas": [*BETAS], "eps": epsilon, "weight_decay": 0.0}
    return from_dict(
        {
            "run": {"dir": str(directory), "name": "run"},
            "model": to_dict(Config(model=model))["model"],
            "parallel": {"dp": 1},
            "data": {"train": str(prefix), "sequence_length": length, "shuffle": False},
            "train": train | {"precision": PRECISIONS[dtype]},
            "optimizer": optimizer | {"decay": "constant"},
            "checkpoint": {"load": "none"},
        }
    )


def _our_steps(
    config: Config,
    names: dict[str, list[tuple[str, slice]]],
    losses: list[float],
    directory: Path,
    dtype: str,
    progress: Report,
) -> Iterator[TensorErrors]:
    """Train, yield the comparisons with the tensors in the directory, and append our losses."""
    progress("opening our model")
    trainer, bounds = Trainer(config, build.make_mesh(config)), BOUNDS[dtype]
    yield _compared("weight at the start", bounds.weight, names, trainer, directory / "start")
    for step in range(config.train.steps):
        progress("our steps", step, config.train.steps, "steps")
        losses.append(trainer.step().loss)
        if step == 0:
            yield _compared("gradient", bounds.gradient, names, trainer, directory / "gradient")
    yield _compared("weight after the steps", bounds.weight, names, trainer, directory / "end")
    trainer.close()


def _names(source: HuggingFaceSource) -> dict[str, list[tuple[str, slice]]]:
    """Return for each of our tensors the tensors of the file that it is compared under, with our rows.

    A part of a packed tensor has its own name in parentheses.
    """
    shared = Counter(place.theirs for place in source.places.values())
    names: dict[str, list[tuple[str, slice]]] = {}
    for name, place in source.places.items():
        sizes = list(place.tensors.items())
        if place.pieces and len(place.rows) == place.shape[0]:
            own, start = list[tuple[str, slice]](), 0
            for theirs, shape in sizes:
                own.append((theirs, slice(start, start + shape[0])))
                start += shape[0]
            names[name] = own
        else:
            packed = shared[place.theirs] > 1 or len(place.rows) < _rows(place)
            ours = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
            part = f" ({ours})" if packed else ""
            names[name] = [(abbreviated([theirs for theirs, _ in sizes], 2) + part, slice(None))]
    return names


def _rows(place: TensorPlace) -> int:
    return place.shape[1 if place.transposed else 0]


def _compared(
    kind: str,
    bound: float,
    names: dict[str, list[tuple[str, slice]]],
    trainer: Trainer,
    directory: Path,
) -> TensorErrors:
    """Compare our weights, or the gradients of our first step, with the tensors in a directory."""
    theirs = HuggingFaceSource.of(directory)
    state = "exp_avg" if kind == "gradient" else "weight"
    scale = 1 - BETAS[0] if kind == "gradient" else 1.0  # the first moment is (1 - beta) times the gradient
    ours = global_tensors(trainer, (state,))
    norms: list[tuple[str, float, float]] = []
    for name, parts in names.items():
        if f"{state}/{name}" not in ours:  # not trained; a step of transformers would show in the weights
            continue
        own = ours.pop(f"{state}/{name}").double().div_(scale)
        other = theirs.read(name, [0] * own.dim(), own.shape).double()
        norms += [
            (theirs_name, (own[rows] - other[rows]).norm().item(), other[rows].norm().item())
            for theirs_name, rows in parts
        ]
    floor = FLOOR * max(norm for _, _, norm in norms)
    errors = [TensorError(name, _finite(error / max(norm, floor, 1e-30))) for name, error, norm in norms]
    return TensorErrors(kind, bound, sorted(errors, key=lambda each: -each.error))
