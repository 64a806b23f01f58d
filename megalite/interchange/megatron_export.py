"""A checkpoint → Megatron-LM's, in torch_dist or legacy format.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/        metadata.json, common.pt, .metadata and __0_0.distcp; or mp_rank_TT_PPP/
                             model_optim_rng.pt

A checkpoint that was imported from Megatron-LM is exported with the names, arguments and layout that it had;
others with those of Transformer Engine's layer specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, Manifest, directories
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.huggingface.export_files import new_directory
from megalite.huggingface.original import model_of
from megalite.interchange.export_plan import Export, LegacyLayout
from megalite.interchange.export_state import StateToExport
from megalite.interchange.import_state import origin_of
from megalite.interchange.megatron_arguments import (
    DIVISIBLE,
    arguments_of,
    check_same,
    config_of,
    latent_note,
    padded_rows,
)
from megalite.interchange.megatron_dist_writer import write_dist
from megalite.interchange.megatron_legacy_writer import write_legacy
from megalite.interchange.megatron_places import MegatronTensor, megatron_tensors
from megalite.interchange.megatron_source import MODEL, MOMENTS, TRACKER
from megalite.interchange.megatron_spelling import IN_TRANSFORMER_ENGINE, Spelling
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.system.files import write_synced
from megalite.system.progress import Report, silent

Format = Literal["torch_dist", "legacy"]


def export_megatron(
    source: Path | Manifest,
    target: Path,
    form: Format = "torch_dist",
    *,
    layout: LegacyLayout | None = None,
    dtype: torch.dtype | None = None,
    weights_only: bool = False,
    progress: Report = silent,
) -> dict[str, Any]:
    """Export a checkpoint to Megatron-LM, and return a summary for display.

    Args:
        source: directory of the checkpoint, or its manifest.
        layout: of the legacy format; default: that of the import, or one rank.
        dtype: of the weights; default: of the run's compute precision with state of the optimizer, otherwise
            as stored.
        weights_only: leave out the state of the optimizer.

    Raises:
        ConfigError, CheckpointError: the export failed. The directory is renamed to `target` only when it is
            complete.
    """
    directories.check_free(target)
    manifest = source if isinstance(source, Manifest) else checkpoint.manifest_of(source)
    manifest.check_files()
    export = _prepared(manifest, form, layout, dtype, weights_only)
    kinds = {kind for tensor in export.tensors.values() for kind in export.state.kinds(tensor)}
    with new_directory(target) as temporary:
        place = temporary / f"iter_{export.iteration:07d}"
        place.mkdir()
        if form == "legacy":
            write_legacy(place, export, progress)
        else:
            write_dist(place, export, progress)
        write_synced(temporary / TRACKER, str(export.iteration))
    dtypes = {export.state.dtype(MODEL, tensor) for tensor in export.tensors.values() if tensor.parts}
    return {
        "family": f"megatron {form}",
        "parameters": parameter_count(model_specs(export.config.model)),
        "dtypes": sorted(str(each).removeprefix("torch.") for each in dtypes),
        "optimizer": MOMENTS[0] in kinds,
        "step": export.iteration,
        "notes": latent_note(export.config.model),
    }


def _prepared(
    manifest: Manifest,
    form: Format,
    layout: LegacyLayout | None,
    dtype: torch.dtype | None,
    weights_only: bool,
) -> Export:
    model = model_of(manifest)
    config = replace(from_dict(manifest.state["config"]), model=model)
    if model.mup is not None:
        raise CheckpointError(
            f"{manifest.directory} was trained with model.mup = {model.mup}, which Megatron-LM "
            "computes otherwise. Export it with megalite convert export to a Hugging Face directory, import "
            "this, and export the result."
        )
    if config.lora.rank:
        raise CheckpointError(
            f"{manifest.directory} contains adapters. Merge them with megalite convert export to a Hugging "
            "Face "
            "directory, import this, and export the result."
        )
    if model.output_head != "vocabulary" or model.mtp_layers:
        what = (
            "the head of a reward model"
            if model.output_head != "vocabulary"
            else "multi-token prediction modules"
        )
        raise CheckpointError(f"{manifest.directory} has {what}, which are not exported to Megatron-LM.")
    origin = origin_of(manifest.directory, model)
    origin = origin if str(origin.get("format", "")).startswith("megatron") else {}
    optimizer = not weights_only and any(name.startswith(f"{MOMENTS[0]}/") for name in manifest.tensors)
    if optimizer and config.optimizer.name != "adamw":
        raise CheckpointError(
            f"{manifest.directory} has the state of optimizer.name={config.optimizer.name}, but only that "
            "of adamw is "
            "exported. Export the weights alone with --weights_only."
        )
    if optimizer and (reason := _not_of_megatron(config, manifest, dtype)):
        raise CheckpointError(f"{manifest.directory} {reason} Export the weights alone with --weights_only.")
    layout = layout or _layout_of(origin, form)
    tensors = megatron_tensors(model)
    spelling = _spelling_of(origin, tensors, config, form)
    rows, arguments = _arguments(origin, config, layout)
    if optimizer and dtype is None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
    state = StateToExport(
        manifest,
        model,
        tensors,
        dtype=dtype,
        wide=origin.get("wide", ()),
        rows=rows,
        optimizer=optimizer,
        distributed=form == "torch_dist" and bool(arguments.get("use_distributed_optimizer")),
    )
    step, samples = manifest.state["step"], manifest.state.get("samples", 0)
    arguments |= {
        "iteration": step,
        "consumed_train_samples": samples,
        "ckpt_format": {"legacy": "torch"}.get(form, form),
    }
    arguments |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual_stages if layout.virtual_stages > 1 else None,
        "expert_model_parallel_size": layout.ep,
    }
    updates = step - manifest.state.get("skipped", 0) if optimizer else None
    scheduler = _scheduler(config, samples) | {
        name: value for name, value in origin.get("scheduler", {}).items() if name != "num_steps"
    }
    same = origin.get("format") == f"megatron {form}" and layout == _layout_of(origin, form)
    extra = list(origin.get("extra_state", ())) if same else []
    return Export(
        config, state, tensors, spelling, layout, arguments, step, updates, samples, scheduler, extra
    )


def _not_of_megatron(config: Config, manifest: Manifest, dtype: torch.dtype | None) -> str:
    """Return why Megatron-LM's AdamW cannot go on with the state of a checkpoint; empty if it can."""
    if config.optimizer.moments != "fp32":
        return (
            f"has moments in {config.optimizer.moments}, and those of Megatron-LM are in fp32. Resume it "
            "for a step with --optimizer.moments fp32."
        )
    if manifest.state.get("started"):
        return "has moments that started at different steps, and Megatron-LM counts one step for both."
    own = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
    if dtype is not None and dtype is not (own or torch.float32):
        return (
            f"was trained in {config.train.precision}, which decides with the state of the optimizer whether "
            f"Megatron-LM has master weights: --dtype {str(dtype).removeprefix('torch.')} does not fit it."
        )
    return ""


def _layout_of(origin: Mapping[str, Any], form: Format) -> LegacyLayout:
    stored = origin.get("layout") or {}
    return LegacyLayout(**stored) if form == "legacy" and stored else LegacyLayout()


def _spelling_of(
    origin: Mapping[str, Any], tensors: Mapping[str, MegatronTensor], config: Config, form: Format
) -> Spelling:
    """Return the spelling of the imported checkpoint, or that of Transformer Engine.

    torch_dist then has one tensor for all layers if all have the same tensors.
    """
    alike = _alike(tensors, config)
    stored = origin.get("spelling")
    if stored is None:
        return Spelling(IN_TRANSFORMER_ENGINE, "grouped", form == "torch_dist" and alike)
    spelling = Spelling(**(stored | {"fused": tuple(stored["fused"])}))
    if origin["format"] == f"megatron {form}":
        return spelling
    return replace(spelling, stacked=form == "torch_dist" and alike)


def _alike(tensors: Mapping[str, MegatronTensor], config: Config) -> bool:
    model = config.model
    if model.layer_blocks is not None or (model.num_experts and model.mlp_only_layers):
        return False
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for tensor in tensors.values():
        if tensor.layer is not None:
            layers.setdefault(tensor.layer, {})[tensor.local] = tensor.shape
    return all(each == layers[0] for each in layers.values())


def _arguments(origin: Mapping[str, Any], config: Config, layout: LegacyLayout) -> tuple[int, dict[str, Any]]:
    """Return the rows of the embedding, and the arguments."""
    stored = dict(origin.get("arguments") or {})
    divisible = stored.get("make_vocab_size_divisible_by") or DIVISIBLE
    vocabulary = config.model.vocabulary
    if stored:
        rows = max(origin["rows"], vocabulary)
        try:
            check_same(config.model, config_of(stored, vocabulary, "the export")[0].model, "the arguments")
        except CheckpointError:
            stored = {}  # the run has another model, such as one with a longer context
    if not stored:
        rows = max(padded_rows(vocabulary, divisible, layout.tp), origin.get("rows", 0))
        return rows, arguments_of(config, padded=rows, divisible=divisible) | {
            "use_distributed_optimizer": False,
            "params_dtype": config.train.precision,
        }
    if rows % layout.tp:
        rows = padded_rows(rows, divisible, layout.tp)
    return rows, stored | {"padded_vocab_size": rows}


def _scheduler(config: Config, samples: int) -> dict[str, Any]:
    """Return the state of OptimizerParamScheduler, which counts samples."""
    optimizer, train = config.optimizer, config.train
    batch = train.global_batch_size
    return {
        "max_lr": optimizer.lr,
        "lr_warmup_steps": optimizer.warmup_steps * batch,
        "num_steps": samples,
        "lr_decay_style": {"wsd": "WSD"}.get(optimizer.decay, optimizer.decay),
        "lr_decay_steps": (train.steps or 0) * batch,
        "min_lr": optimizer.min_lr,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": (train.steps or 0) * batch,
    }


def check_layout(layout: LegacyLayout, form: Format) -> None:
    """Raise ConfigError for a layout that torch_dist does not need."""
    if form == "torch_dist" and layout != LegacyLayout():
        raise ConfigError(
            "--tp, --pp, --virtual_stages and --ep divide the files of --format megatron-legacy. --format "
            "megatron "
            "(torch_dist) has no layout: Megatron-LM reads it with any. Leave them out."
        )
