"""A first configuration of a run, for `megalite init`: defaults by the size of the model, and the planner's
layout for the devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.run_length import resolve_steps
from megalite.config.schema import Config
from megalite.config.token_files import is_chat, metadata, prefixes
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.planner.hardware.devices import Device, Link
from megalite.planner.report import explanation
from megalite.planner.search.best_first import Plan, Search
from megalite.planner.search.run_config import runnable
from megalite.planner.time.step import PlannedJob

VOCABULARY = 32768
"""Of a model that leaves it to data which are not there yet."""
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
CPU_STEPS = 300
TOKENS_PER_STEP = ((2e8, 2**18), (1e9, 2**19), (1e10, 2**20), (math.inf, 2**22))
"""Parameters up to which a step has so many tokens."""
LEARNING_RATES = ((2e8, 6e-4), (5e8, 3e-4), (1e9, 2.5e-4), (4e9, 2e-4), (1e10, 1.5e-4), (math.inf, 1e-4))
"""Parameters up to which a learning rate is used: those of GPT-3 (Brown et al. 2020, table 2.1)."""
FINE_TUNING_RATE = 1e-5
CPU_BATCH, CPU_LENGTH, GPU_LENGTH = 32, 512, 4096
MOST_WARMUP = 2000
CORE_FLOPS = 4e10  # fp32, of one core


@dataclass(frozen=True)
class Wanted:
    """What the user has decided; None leaves it to the defaults.

    Attributes:
        base: the configuration to start from; of its options only the model's are set, unless `complete`.
        data: as in data.train.
        weights: what initial weights to set as model.init_from.
    """

    base: Config
    complete: bool
    gpus: int
    device: Device
    name: str
    data: str | list[str] | dict[str, float]
    weights: str | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    tokens: int | None = None
    steps: int | None = None


def cpu_device(cores: int, memory: float) -> Device:
    """A CPU as the planner sees it; only its memory decides something, since one process uses all cores."""
    link = Link("memory", 5e9, 2e-5)
    peaks = dict.fromkeys(("fp32", "bf16", "fp16"), cores * CORE_FLOPS)
    return Device("CPU", peaks, 0.7, cores, memory, 2e10, link, link, 1, link, cpu=True)


def first_config(wanted: Wanted) -> tuple[Config, Plan]:
    """The configuration, and its plan. Raises ConfigError or HardwareError if no layout is legal or fits."""
    base = with_sizes(wanted)
    search = Search(PlannedJob.of(base, wanted.device), base, max(1, wanted.gpus), {}, 1)
    plans = search.plans()
    if not plans:
        raise ConfigError(
            explanation.nothing_fits(search)
            if search.considered
            else f"No layout is legal: {explanation.illegal(search)}"
        )
    return runnable(base, plans[0].choice, search.room), plans[0]


def with_sizes(wanted: Wanted) -> Config:
    """The configuration without its layout."""
    # only a configuration has several: it says the rest itself
    base, prefix = wanted.base, (prefixes(wanted.data) or [""])[0]
    given, facts = Path(f"{prefix}.idx").is_file(), metadata(prefix)
    model = replace(base.model, init_from=wanted.weights or base.model.init_from)
    if model.vocab_size is None and facts.get("vocab_size") is None:
        model.vocab_size = VOCABULARY
    known = replace(model, vocab_size=model.vocab_size or facts["vocab_size"])
    parameters = parameter_count(model_specs(known))
    length = wanted.sequence_length or _length(wanted)
    batch = wanted.global_batch_size or _batch(wanted, parameters, length)
    chat = given and is_chat(prefix)
    held_out = 0.01 if given and 0.01 * facts.get("tokens", 0) > 2 * batch * length else None
    data = replace(
        base.data,
        train=wanted.data,
        sequence_length=length,
        packing=base.data.packing or (chat and not wanted.complete),
    )
    data.validation = base.data.validation if wanted.complete else held_out
    train = replace(base.train, global_batch_size=batch)
    if not wanted.complete:
        asked = wanted.steps is not None or wanted.tokens is not None
        train.steps, train.tokens = (
            _steps(wanted, parameters, batch * length, facts.get("tokens") if given else None),
            None,
        )
        if chat and not asked:  # the rows that conversations fill do not follow from their tokens
            train.steps, train.epochs = Config().train.steps, 1.0
    train.precision = _precision(wanted)  # type: ignore[assignment]
    config = replace(base, model=known, data=data, train=train, run=replace(base.run, name=wanted.name))
    return _with_schedule(config, wanted, parameters)


def _precision(wanted: Wanted) -> str:
    if wanted.complete:
        return wanted.base.train.precision
    return wanted.device.own_precision


def _length(wanted: Wanted) -> int:
    if wanted.complete:
        return wanted.base.data.sequence_length
    return min(wanted.base.model.max_position_embeddings, CPU_LENGTH if wanted.device.cpu else GPU_LENGTH)


def _batch(wanted: Wanted, parameters: int, length: int) -> int:
    """Sequences per step: a power of two, and at least one for each device where that is one."""
    if wanted.complete:
        return wanted.base.train.global_batch_size
    if wanted.device.cpu:
        return CPU_BATCH
    tokens = next(tokens for most, tokens in TOKENS_PER_STEP if parameters <= most)
    power = max(1, 2 ** round(math.log2(tokens / length)))
    return -(-power // wanted.gpus) * wanted.gpus


def _steps(wanted: Wanted, parameters: int, tokens_per_step: int, data: int | None) -> int:
    """As asked; else one epoch of the data; else by the number of parameters."""
    if wanted.steps is not None:
        return wanted.steps
    if wanted.tokens is not None:
        return max(1, math.ceil(wanted.tokens / tokens_per_step))
    if data is not None:
        return max(1, data // tokens_per_step)
    return CPU_STEPS if wanted.device.cpu else math.ceil(TOKENS_PER_PARAMETER * parameters / tokens_per_step)


def _with_schedule(config: Config, wanted: Wanted, parameters: int) -> Config:
    """Learning rate, and how often there are checkpoints and validations."""
    if wanted.complete:
        return config
    counted = replace(config, train=replace(config.train))
    resolve_steps(counted)
    steps = counted.train.steps
    rate = (
        FINE_TUNING_RATE
        if wanted.weights
        else next(rate for most, rate in LEARNING_RATES if parameters <= most)
    )
    optimizer = replace(
        config.optimizer,
        lr=rate,
        min_lr=float(f"{rate / 10:.3g}"),
        warmup_steps=min(MOST_WARMUP, steps // 20),
    )
    interval = max(1, min(1000, steps // 10))
    changed: dict[str, Any] = {
        "optimizer": optimizer,
        "checkpoint": replace(config.checkpoint, interval=interval, keep=3),
    }
    if config.data.validation is not None:
        changed["validation"] = replace(config.validation, interval=interval)
    return replace(config, **changed)
