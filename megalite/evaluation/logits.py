"""Compares the logits of a checkpoint with those of transformers on the same tokens, position by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite import checkpoint
from megalite.assembly import parts as build
from megalite.checkpoint.manifest import WEIGHT
from megalite.families.model_config import hf_config, loader_of, stored_dtype
from megalite.generation.sources import ModelSource, for_inference
from megalite.huggingface.files import ConversionError
from megalite.huggingface.source import HF
from megalite.model.stage import Stage
from megalite.parallel.microbatch import Microbatch
from megalite.system.progress import Report, silent

SEED = 0


@dataclass(frozen=True)
class LogitComparison:
    """Differences of logits for one input.

    The largest absolute difference at each position, and the largest absolute logit.
    """

    name: str
    worst: list[float]
    largest: float

    @property
    def maximum(self) -> float:
        return max(self.worst)


def compare(
    source: ModelSource, hf: Path, *, texts: Sequence[str], tokens: int, rows: int, progress: Report = silent
) -> list[LogitComparison]:
    """Compare in fp32 on one process: `rows` rows of `tokens` random tokens, then each text through the
    tokenizer of `hf`.

    Raises CheckpointError or ConfigError if one of the two cannot be loaded.
    """
    model, inputs = source.config.model, inputs_of(source, hf, texts, tokens, rows)
    theirs = _their_logits(hf, inputs, progress)
    for name, logits in theirs.items():
        if logits.shape[-1] != model.vocabulary:
            raise ConversionError(
                f"{hf} does not match {source.name}: {logits.shape[-1]} logits on {name} vs "
                f"{model.vocabulary}"
            )
    progress(f"opening {source.name}")
    stage, differences = load_stage(source), []
    for number, name in enumerate(inputs):
        progress("logits of the checkpoint", number, len(inputs), "inputs")
        differences.append(_comparison(name, our_logits(stage, inputs[name]), theirs[name]))
    return differences


def inputs_of(
    source: ModelSource, hf: Path, texts: Sequence[str], tokens: int, rows: int
) -> dict[str, Tensor]:
    """Return random tokens and the tokens of each text, [rows, tokens], by a description."""
    model = source.config.model
    longest = min(tokens, model.max_position_embeddings)
    random = torch.randint(model.vocabulary, (rows, longest), generator=torch.Generator().manual_seed(SEED))
    return {f"{rows} x {longest} random tokens": random} | {
        show_text(text): encode(text, hf, model.vocabulary, model.max_position_embeddings) for text in texts
    }


def rounding(source: ModelSource, hf: Path) -> str | None:
    """Explain a difference if the directory has a lower precision than the checkpoint; else None."""
    dtype = stored_dtype(hf_config(hf))
    if source.name.startswith(HF):
        return None
    tensors = checkpoint.manifest_of(Path(source.name)).tensors
    weights = [stored.dtype for name, stored in tensors.items() if name.startswith(WEIGHT)]
    if dtype not in ("bfloat16", "float16") or not {"float32", "float64"}.intersection(weights):
        return None
    return (
        f"the weights in {hf} are rounded to {dtype}. Export the checkpoint with --dtype float32 to "
        "see whether anything else differs"
    )


def _comparison(name: str, ours: Tensor, theirs: Tensor) -> LogitComparison:
    # [tokens]; JSON knows no infinity
    difference = (ours - theirs).abs().amax((0, 2)).nan_to_num(nan=torch.finfo(torch.float32).max)
    return LogitComparison(name, difference.tolist(), theirs.abs().max().item())


def show_text(text: str) -> str:
    return repr(text if len(text) <= 30 else f"{text[:29]}…")


def encode(text: str, hf: Path, vocabulary: int, longest: int) -> Tensor:
    """Return the first tokens of a text, [1, tokens], by the tokenizer of a Hugging Face directory."""
    from megalite.data.tokenizer.tokenizers import load

    ids = load(hf).encode(text)[:longest]
    if not ids or max(ids) >= vocabulary:
        raise ConversionError(
            f"the tokenizer of {hf} returns {'no tokens' if not ids else f'token {max(ids)}'} for "
            f"{show_text(text)}"
        )
    return torch.tensor([ids])


def _their_logits(hf: Path, inputs: dict[str, Tensor], progress: Report) -> dict[str, Tensor]:
    """Compute the logits of transformers, [rows, tokens, vocabulary], for each input."""
    model, logits = load_transformers(hf, torch.float32, progress), dict[str, Tensor]()
    with torch.no_grad():
        for name, ids in inputs.items():
            progress("logits of transformers", len(logits), len(inputs), "inputs")
            logits[name] = model(input_ids=ids, use_cache=False).logits
    return logits


def load_transformers(hf: Path, dtype: torch.dtype, progress: Report = silent) -> Any:
    """Load a directory with transformers, without dropout.

    Raises ConversionError if it cannot be loaded, or if tensors are missing or left over.
    """
    progress(f"loading {hf} with transformers")
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # `progress` is enough
    try:
        options: dict[str, Any] = {
            "dtype": dtype,
            "attn_implementation": "eager",
            "experts_implementation": "eager",  # torch multiplies grouped matrices of at most fp32
            "output_loading_info": True,
        }
        loader = getattr(transformers, loader_of(hf_config(hf)))
        opened: Any = loader.from_pretrained(str(hf), local_files_only=True, **options)
        model, report = opened
    except Exception as error:  # transformers raises exceptions of many types
        raise ConversionError(
            f"transformers failed to load {hf}: "
            f"{(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from None
    wrong = [
        f"{kind.replace('_', ' ')}: {sorted(map(str, keys))[0]}"
        for kind, keys in report.items()
        if keys and kind != "error_msgs"
    ]
    if wrong:
        raise ConversionError(f"transformers loads {hf} with {'; '.join(wrong)}")
    return model.eval()


class _InDouble(TorchFunctionMode):
    """Computes in fp64 what transformers computes in fp32 in a model of any dtype, as norms and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def arithmetic_in(dtype: torch.dtype) -> Iterator[None]:
    """Compute what transformers leaves to defaults, or casts to fp32, in fp64 if that is the dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _InDouble() if dtype == torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(default)


def load_stage(source: ModelSource, precision: str = "fp32") -> Stage:
    """Load a whole model in this process, in fp32 or fp64, for forward passes only."""
    config = for_inference(source.config, precision=precision)
    parts = build.build_parts(config, build.make_mesh(config), "cpu", training=False)
    source.read(parts.to_load())
    source.read_base(parts)
    parts.store.publish()
    return parts.stages[0]


@torch.no_grad()
def our_logits(stage: Stage, ids: Tensor) -> Tensor:
    """Compute the logits [rows, tokens, vocabulary] of ids [rows, tokens]."""
    tokens = ids.t().contiguous()  # [tokens, rows]
    state = stage.forward_state(
        Microbatch.of(tokens, tokens, torch.zeros(len(ids), dtype=torch.int64)), step=0, training=False
    )
    return stage.logits(tokens, state)[..., : stage.model_config.vocabulary].transpose(0, 1)
