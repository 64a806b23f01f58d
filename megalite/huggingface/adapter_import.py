"""Loading of LoRA adapters in PEFT's format as the start of a run.

The location of each tensor is determined by `peft_modules`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.assembly.parts import DTYPES
from megalite.checkpoint.errors import listing
from megalite.checkpoint.finite import nonfinite, reject
from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.resized_embeddings import Read, of_checkpoint
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.families.weight_files import ADAPTER, ADAPTER_SETTINGS
from megalite.huggingface import initial_weights
from megalite.huggingface.base_weights import BaseWeights, quantized_matrices
from megalite.huggingface.files import ConversionError, TensorFiles
from megalite.huggingface.merging import adapted, parts_of
from megalite.huggingface.original import head_of, places_of
from megalite.huggingface.peft_modules import EMBEDDING, AdaptedModule, FusedExperts, modules_of, saved_keys
from megalite.huggingface.tensor_places import TensorPlace
from megalite.model.adapter_parameters import MAGNITUDE, A, name_of
from megalite.model.spec_builder import REWARD
from megalite.parallel.quantized.reading import BASE
from megalite.parallel.spec import Rectangle

OFF = """alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config
    monteclora_config trainable_token_indices use_bdlora use_qalora velora_config"""
"""Settings of PEFT's LoraConfig that change the result of an adapter and must be off.

PEFT ignores unknown settings.
"""
STARTS_FROM_W = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged.

Others, such as pissa and olora, change the weights that the adapter is applied to.
"""


REWARD_HEAD = f"{REWARD}.weight"


def starting_weights(config: Config) -> Read:
    """Return a function that fills a rank's rectangles from hf:DIR or an adapter.

    The function raises CheckpointError.
    """
    base = initial_weights.starting_weights(
        config.model, config.run.seed, beside_adapter=config.lora.init_from is not None
    )
    if config.lora.init_from is not None:
        return partial(_fill, config, base)
    assert base is not None, "a checkpoint alone gives the weights"
    return base


def has_reward_head(config: Config) -> bool:
    """Return whether the adapter of lora.init_from has the head of a reward model, as that of one has.

    Raises:
        ConversionError: it cannot be read.
    """
    tensors, start = TensorFiles(Path(config.lora.init_from or ""), ADAPTER), _start(config)
    return REWARD_HEAD in _saved_in(tensors, config, places_of(config.model, start))


def _start(config: Config) -> Path:
    return Path(config.model.initial_weights or "")


def _saved_in(tensors: TensorFiles, config: Config, places: dict[str, TensorPlace]) -> dict[str, list[str]]:
    """Return `saved_keys` of a run, without the head of a reward model if the adapter does not have it."""
    saved = saved_keys(config.model, config.lora, places, head_of(config.model, _start(config)))
    return {
        name: keys
        for name, keys in saved.items()
        if name != REWARD_HEAD or all(key in tensors for key in keys)
    }


def _fill(config: Config, base: Read | None, rectangles: Sequence[Rectangle]) -> None:
    start = _start(config)
    if base is None:
        manifest = checkpoint.manifest_of(start)
        if config.checkpoint.verify == "full":
            manifest.verify(0, 1)
        if BASE in manifest.state:
            raise ConversionError(
                f"model.init_from={start} has adapters over a quantized base, and not the base. Set "
                f"model.init_from to the weights of that run, {manifest.state[BASE]['source']}."
            )
        base = of_checkpoint(config.model, config.run.seed, manifest)
    adapter = PeftAdapter(config, start, base)
    base([part for part in rectangles if part.name.removeprefix(WEIGHT) not in adapter.names])
    adapter.check()  # of what the adapter says about the weights, which can now be read
    for part in rectangles:
        if (name := part.name.removeprefix(WEIGHT)) in adapter.names:
            whole = adapter[name]
            part.tensor.copy_(
                whole[
                    tuple(
                        slice(low, low + size)
                        for low, size in zip(part.offsets, part.tensor.shape, strict=True)
                    )
                ]
            )


class PeftAdapter:
    """The adapters of a run in a PEFT directory, as a mapping from our names to tensors.

    Raises ConversionError if they do not match the run.

    The product that it adds to the weights is preserved: if its factor on B A differs from the run's, B is
    scaled.

    Args:
        start: the directory of the weights that it adapts.
        base: fills rectangles of these weights.
    """

    def __init__(self, config: Config, start: Path, base: Read):
        self.lora, self.directory, self.base = config.lora, Path(config.lora.init_from or ""), base
        self.dtype = DTYPES[config.train.precision]
        self.config, self.quantized = config, quantized_matrices(config)
        self.settings = _read_settings(self.directory, self.lora.dora)
        self.tensors = TensorFiles(self.directory, ADAPTER)
        self.places, self.roles = places_of(config.model, start), adapted(config.model, config.lora)
        self.modules = modules_of(self.places, self.roles)
        self.saved = _saved_in(self.tensors, config, self.places)
        self.tied = config.model.tied_head
        self._where = {
            name_of(weight, part): (module, weight, part)
            for module in self.modules
            for weight in module.weights
            for part in parts_of(self.lora)
        }
        self.names = self._where.keys() | self.saved.keys()
        self.row_lengths = cache(self._row_lengths)

    def check(self) -> None:
        """Raise ConversionError if the directory does not contain the adapters of the run."""
        expected = {key for module in self.modules for key in module.keys(self.lora.dora)}.union(
            *self.saved.values()
        )
        head = self.saved[EMBEDDING][-1] if self.tied and EMBEDDING in self.saved else None
        why = {head: ": PEFT trains a tied head together with the embedding only with ensure_weight_tying"}
        problems = [
            f"{key} is missing{why.get(key, '')}" for key in sorted(expected) if key not in self.tensors
        ]
        problems += [
            f"{key} is neither in lora.targets nor in lora.modules_to_save"
            for key in self.tensors
            if key not in expected
        ]
        for module in () if problems else self.modules:
            problems += self._misfits(module)
        for name in () if problems else self.saved:
            problems += self._misfits_of_saved(name)
        if not problems:
            reject(
                f"lora.init_from={self.directory}",
                {key: nonfinite(tensor) for key, tensor in self.tensors.items()},
            )
        if problems:
            raise ConversionError(
                f"lora.init_from={self.directory} does not match the adapters of this run:{listing(problems)}"
            )

    def _ranks(self, module: AdaptedModule) -> list[int]:
        return [self.lora.rank_of(self.roles[name]) for name in module.weights]

    def _is_shared(self, module: AdaptedModule, rank: int) -> bool:
        """Return whether all our projections in the module share a single A of this rank."""
        return set(self._ranks(module)) == {rank}

    def _misfits(self, module: AdaptedModule) -> Iterator[str]:
        """Yield the tensors of a module that do not match the adapters of the run."""
        a, b, *magnitudes = (self.tensors[key] for key in module.keys(self.lora.dora))
        ranks, rank, (outputs, inputs) = self._ranks(module), len(a), module.shape
        if isinstance(module, FusedExperts):
            every = module.number * ranks[0]
            if (*a.shape, *b.shape) != (every, inputs, outputs, every):
                has = f"has A {list(a.shape)} and B {list(b.shape)}"
                yield f"{module.name} {has}, but the run has {module.number} experts with rank {ranks[0]}"
        elif (*a.shape, *b.shape) != (rank, inputs, outputs, rank):
            yield (
                f"{module.name} has A {list(a.shape)} and B {list(b.shape)}, but the module of the model "
                f"has {inputs} inputs and {outputs} outputs"
            )
        elif not self._is_shared(module, rank) and (rank != sum(ranks) or self._outside(module, b, ranks)):
            own = (
                f"lora.rank={self.lora.rank}"
                if set(ranks) == {self.lora.rank}
                else f"lora.ranks={show(self.lora.ranks)}"
            )
            yield f"{module.name} has rank {rank}, but {own}"
        elif self._outside(module, b) or any(self._is_changed(module, each) for each in magnitudes):
            yield f"{module.name} adapts outputs that are not in lora.targets"

    def _outside(self, module: AdaptedModule, b: Tensor, ranks: Sequence[int] = ()) -> bool:
        """Return whether B is nonzero outside the rows of our projections or, with their `ranks`, outside
        their blocks on its diagonal.
        """
        rest = b.clone()
        for index, name in enumerate(module.weights):
            start = sum(ranks[:index])
            rest[module.rows(name), slice(start, start + ranks[index]) if ranks else slice(None)] = 0
        return bool(rest.any())

    def _is_changed(self, module: AdaptedModule, magnitudes: Tensor) -> bool:
        """Return whether the lengths of rows without an adapter differ from the weight.

        Differences within the rounding of the stored magnitudes are ignored. The weight is rounded in every
        precision, because the adapter does not record the precision of the run that trained it.
        """
        tolerance = max(8 * torch.finfo(magnitudes.dtype).eps, 1e-5)
        others = {
            name: rows for name, rows in module.all_weights(self.places).items() if name not in module.weights
        }

        def are_lengths(dtype: torch.dtype) -> bool:
            lengths = {name: self.row_lengths(name, dtype) for name in others}
            return all(
                torch.allclose(magnitudes[others[name]].to(own.dtype), own, rtol=tolerance, atol=0)
                for name, own in lengths.items()
            )

        return not any(are_lengths(dtype) for dtype in (self.dtype, *DTYPES.values()))

    def _misfits_of_saved(self, name: str) -> Iterator[str]:
        place, keys = self.places[name], self.saved[name]
        expected = [*place.tensors.values()] + [place.shape] * (len(keys) - len(place.tensors))
        for key, shape in zip(keys, expected, strict=True):
            if self.tensors.shape(key) != shape:
                yield f"{key} has shape {list(self.tensors.shape(key))}, expected {list(shape)}"
        if self.tied and name == EMBEDDING and not torch.equal(self.tensors[keys[0]], self.tensors[keys[1]]):
            yield (
                f"{keys[0]} and {keys[1]} differ, but the model ties head and embedding "
                "(model.tie_word_embeddings)"
            )

    @cached_property
    def _weights(self) -> BaseWeights:
        return BaseWeights(self.config, self.config.model.initial_weights)

    def _row_lengths(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the row lengths of a weight as a run of this dtype stores it, in at least fp32."""
        rows, columns = len(self.places[name].rows), self.places[name].numel // len(self.places[name].rows)
        weight = torch.empty(rows, columns, dtype=dtype)
        if name in self.quantized:
            weight = self._weights.quantized(*self.quantized[name]).to(dtype)
        else:
            self.base([Rectangle(WEIGHT + name, (rows, columns), (0, 0), weight)])
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(dtype, torch.float32))

    def _scale(self, module: AdaptedModule, rank: int) -> float:
        """Return PEFT's factor on B A of a module."""
        weight = f"{module.name}.weight"
        by_weight = any(
            f".{weight}".endswith(f".{each}") for each in self.settings.get("target_parameters") or ()
        )
        name = weight if by_weight else module.name
        alpha = _by_pattern(self.settings.get("alpha_pattern"), name, self.settings["lora_alpha"])
        return float(alpha / (rank**0.5 if self.settings.get("use_rslora") else rank))

    def __getitem__(self, name: str) -> Tensor:
        """Return one of our tensors: A [rank, in], B [out, rank], magnitudes [out], or one that is trained in
        full.
        """
        if name in self.saved:
            place = self.places[name]
            pieces = [self.tensors[key] for key in self.saved[name][: len(place.tensors)]]
            whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(place.shape)
            return place.read(whole, (0,) * len(place.shape), (len(place.rows), *place.shape[1:]))
        module, weight, part = self._where[name]
        a, b, *magnitudes = (self.tensors[key] for key in module.keys(self.lora.dora))
        if part == MAGNITUDE:
            lengths = self.row_lengths(weight, self.dtype)
            return magnitudes[0][module.rows(weight)].to(lengths.dtype) - lengths
        if isinstance(module, FusedExperts):
            return (
                a if part == A else self._scaled(module.from_peft(b), module, weight, len(a) // module.number)
            )
        ranks, index = self._ranks(module), list(module.weights).index(weight)
        start = sum(ranks[:index])
        own = slice(None) if self._is_shared(module, len(a)) else slice(start, start + ranks[index])
        if part == A:
            return a[own]
        return self._scaled(b[module.rows(weight), own], module, weight, len(a))

    def _scaled(self, values: Tensor, module: AdaptedModule, weight: str, rank: int) -> Tensor:
        """Return a part of PEFT's B of this rank, scaled by the difference of the factors on B A."""
        factor = self._scale(module, rank) / self.lora.scale_of(self.roles[weight])
        return (
            values
            if abs(factor - 1) < 1e-12
            else values.to(torch.promote_types(values.dtype, torch.float32)) * factor
        )


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's or parameter's name, as in
    PEFT.
    """
    return next(
        (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module)),
        default,
    )


def _read_settings(directory: Path, dora: bool) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises ConversionError if the adapter is neither LoRA nor DoRA, or does not match lora.dora.
    """
    path = directory / ADAPTER_SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind, start, bias = (
            settings["peft_type"],
            settings.get("init_lora_weights", True),
            settings.get("bias", "none"),
        )
        wrong = [f"{name} = {value}" for name, value in settings.items() if name in OFF.split() and value]
        wrong += [
            f"{name} = {value}"
            for name, value, good in (("peft_type", kind, "LORA"), ("bias", bias, "none"))
            if value != good
        ]
        wrong += [] if start in STARTS_FROM_W else [f"init_lora_weights={start}"]
        theirs = bool(settings.get("use_dora"))
        settings["lora_alpha"] / settings["r"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConversionError(
            f"Could not read the LoRA settings in {path}: {type(error).__name__}: {error}"
        ) from None
    if wrong:
        raise ConversionError(
            f"{path} sets {wrong[0]}, which is not supported. Supported adapters: LoRA, rsLoRA and DoRA."
        )
    if theirs != dora:
        raise ConversionError(
            f"{path} has use_dora={show(theirs)}, which does not match lora.dora={show(dora)}. Set "
            f"lora.dora={show(theirs)}."
        )
    return settings
