"""Compares the logits of a checkpoint with those of transformers on the same tokens, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.assembly import parts as build
from megalite.checkpoint import CheckpointError, Manifest
from megalite.checkpoint.manifest import WEIGHT
from megalite.config.load import from_dict
from megalite.families.model_config import hf_config, loader_of, stored_dtype
from megalite.generation.sources import for_inference
from megalite.huggingface.convert import model_of
from megalite.huggingface.files import ConversionError
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
    directory: Path, hf: Path, *, texts: Sequence[str], tokens: int, rows: int, progress: Report = silent
) -> list[LogitComparison]:
    """Compare in fp32 on one process: `rows` rows of `tokens` random tokens, then each text through the
    tokenizer of `hf`.

    Raises CheckpointError or ConfigError if one of the two cannot be loaded.
    """
    manifest = checkpoint.manifest_of(directory)
    model = model_of(manifest)
    longest = min(tokens, model.max_position_embeddings)
    random = torch.randint(model.vocabulary, (rows, longest), generator=torch.Generator().manual_seed(SEED))
    inputs = {f"{rows} x {longest} random tokens": random}
    inputs |= {
        show_text(text): _encode(text, hf, model.vocabulary, model.max_position_embeddings) for text in texts
    }
    theirs = _their_logits(hf, inputs, progress)
    for name, logits in theirs.items():
        if logits.shape[-1] != model.vocabulary:
            raise ConversionError(
                f"{hf} does not match {directory}: {logits.shape[-1]} logits on {name} vs {model.vocabulary}"
            )
    progress(f"opening {directory}")
    stage, differences = load_stage(manifest), []
    for number, name in enumerate(inputs):
        progress("logits of the checkpoint", number, len(inputs), "inputs")
        differences.append(_comparison(name, our_logits(stage, inputs[name]), theirs[name]))
    return differences


def rounding(directory: Path, hf: Path) -> str | None:
    """Explain a difference if the directory has a lower precision than the checkpoint; else None."""
    manifest, dtype = checkpoint.manifest_of(directory), stored_dtype(hf_config(hf))
    weights = [stored.dtype for name, stored in manifest.tensors.items() if name.startswith(WEIGHT)]
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


def _encode(text: str, hf: Path, vocabulary: int, longest: int) -> Tensor:
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
    progress(f"loading {hf} with transformers")
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # `progress` is enough
    try:
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "attn_implementation": "eager",
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
    logits: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, ids in inputs.items():
            progress("logits of transformers", len(logits), len(inputs), "inputs")
            logits[name] = model.eval()(input_ids=ids, use_cache=False).logits
    return logits


def load_stage(manifest: Manifest) -> Stage:
    """Load the whole model of a checkpoint in this process, in fp32, for forward passes only."""
    if "config" not in manifest.state:
        raise CheckpointError(f"{manifest.directory} contains no configuration")
    config = for_inference(from_dict(manifest.state["config"]))
    parts = build.build_parts(config, build.make_mesh(config), "cpu", training=False)
    checkpoint.load(manifest, parts.to_load(), convert=True)
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
