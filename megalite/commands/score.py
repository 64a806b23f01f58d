"""Ask a model once for what later runs need of it: as the reference of preferences, or as a teacher.

    megalite score hf:models/llama --data data/pairs --output scores/pairs [--tp 2 --pp 2 --dp 2]
    megalite train … --train.objective dpo --preference.reference scores:scores/pairs

stores the log-probability of each completion, and with --top_k the most probable words at every position:

    megalite score hf:models/large --data data/chats --top_k 64 --sequence_length 2048 --output scores/large
    megalite train … --train.objective distillation --distillation.teacher scores:scores/large

Started again with the same output, it continues where it stopped, also on another layout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint.errors import CheckpointError
from megalite.commands.models import add_base_option, add_layout_options, base_named, layout_of, weights_of
from megalite.commands.parser import Parser, as_name, as_path, positive, progress_of, said, warn
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with

if TYPE_CHECKING:
    from megalite.config.schema import Config
    from megalite.data.teacher_words import TeacherWords
    from megalite.evaluation.stored_passes import RowOptions

ONLY_WITH_TOP_K = {"temperature": 1.0, "packing": False, "reset_positions": False, "held_out": 0.0}
"""Options about a teacher's words, and their defaults."""


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    words = sys.argv[1:] if argv is None else argv
    options = tool.parse_args(words)
    try:
        options.model, options.base = weights_of(options.model), base_named(options.base)
        options.data = [*map(str, options.data)]
        ranks = prod(layout_of(options, ("dp",)).values())
        notes = check(options)
        if ranks > 1 and "WORLD_SIZE" not in os.environ:
            from megalite.launch.local_ranks import run_ranks

            return run_ranks(ranks, ["-m", "megalite", "score", *words])
        for note in notes:
            warn(note)
        facts = run(options)
    except (CheckpointError, ConfigError, OSError) as error:
        exit_with(f"{tool.prog}: {said(error)}")
    if os.environ.get("RANK", "0") == "0":
        what = "completions" if options.top_k is None else "rows"
        line = f"{options.output}: {facts['documents' if options.top_k is None else 'rows']:,} {what}"
        print(json.dumps(facts) if options.json else line, flush=True)
    return 0


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add("model", type=as_name, metavar="CHECKPOINT_DIR|RUN_DIR|hf:DIR|org/name", help="the model")
    add("--data", type=as_path, nargs="+", required=True, metavar="PREFIX", help="token files")
    add("--output", type=as_path, required=True, metavar="DIR", help="directory of the scores")
    add("--dp", type=positive, default=1, help="data-parallel ranks (default 1)")
    add_base_option(add)
    add_layout_options(add, positive, rows="row")
    add(
        "--allow_tokenizer_change",
        action="store_true",
        help="accept data prepared with a tokenizer that is not the model's",
    )
    add("--micro_batch_size", type=positive, default=4, metavar="N", help="rows per forward pass (default 4)")
    add(
        "--sequence_length",
        type=positive,
        metavar="N",
        help="tokens per row (default: 2048, or the longest pair); required with --top_k",
    )
    add("--top_k", type=positive, metavar="K", help="store the K most probable words at every position")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="with --top_k, divisor of the logits (default 1)",
    )
    add("--packing", action="store_true", help="with --top_k, rows of conversations as with data.packing")
    add(
        "--reset_positions",
        action="store_true",
        help="with --top_k, documents of text as with data.reset_positions",
    )
    add(
        "--held_out",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="with --top_k, what data.validation holds out",
    )
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def check(options: argparse.Namespace) -> list[str]:
    """Raise CheckpointError or ConfigError for errors that every rank would hit, before any rank is started.

    Returns:
        lines for the user about tokenizers.
    """
    from megalite.evaluation.preference_scores import check_tokenizer, open_scores
    from megalite.generation.sources import check_layout, for_inference, open_source

    source = open_source(options.model, base=options.base)
    config = for_inference(source.config, **model_axes(options))
    check_layout(replace(config, parallel=replace(config.parallel, dp=options.dp)))
    if options.top_k is None:
        for name, default in ONLY_WITH_TOP_K.items():
            if getattr(options, name) != default:
                raise ConfigError(f"--{name} has no effect without --top_k. Remove it, or add --top_k K.")
        rows_of(options, config)
    else:
        check_words(options, config)
    allow = options.allow_tokenizer_change
    notes = [line for prefix in options.data for line in check_tokenizer(prefix, source, allow)]
    if os.environ.get("RANK", "0") == "0":
        if options.top_k is None:
            open_scores(Path(options.output), options.model, options.precision)
        else:
            words_of(options, config, options.precision)
    return notes


def check_words(options: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError for an option that does not fit --top_k."""
    from megalite.config.rules.context import RuleContext
    from megalite.config.sections.data import RULES as DATA_RULES
    from megalite.data.dataset import build
    from megalite.evaluation.stored_passes import pass_config

    if options.cp > 1:
        raise ConfigError(f"--cp {options.cp} is not supported with --top_k. Use --tp, --pp and --dp.")
    if not 0 <= options.held_out < 1:
        raise ConfigError(f"--held_out must be a fraction from 0 to below 1, got {options.held_out:g}.")
    if not options.temperature > 0:
        raise ConfigError(f"--temperature must be positive, got {options.temperature:g}.")
    if options.sequence_length is None:
        raise ConfigError("--top_k requires --sequence_length, that of the runs which will use the words.")
    if options.sequence_length > (longest := config.model.max_position_embeddings):
        raise ConfigError(
            f"--sequence_length {options.sequence_length} is more than the {longest:,} positions of "
            f"{options.model}. Set it to at most {longest}."
        )
    (files,) = passes_of(options)
    data = pass_config(config, files, rows_of(options, config)).data
    facts = RuleContext(data=data)
    for rule in DATA_RULES:
        if rule.broken(facts):
            raise ConfigError(f"--data {' '.join(options.data)} has no such rows: {rule.describe(facts)}")
    build(data, 0)


def passes_of(options: argparse.Namespace) -> list[Any]:
    """Return data.train of each pass: a file of preferences, or for words all files as a blend, whose
    held-out parts are one text."""
    return options.data if options.top_k is None else [dict.fromkeys(options.data, 1.0)]


def rows_of(options: argparse.Namespace, config: Config) -> RowOptions:
    """Return what determines rows: the user's options, or for preferences packed rows of a length that
    fits."""
    from megalite.evaluation.preference_scores import length_of
    from megalite.evaluation.stored_passes import RowOptions

    if options.top_k is None:
        length = length_of(options.data, config.model.max_position_embeddings, options.sequence_length)
        return RowOptions(options.dp, options.micro_batch_size, length, packing=True)
    return RowOptions(
        options.dp,
        options.micro_batch_size,
        options.sequence_length,
        options.packing,
        options.reset_positions,
        options.held_out,
        options.allow_tokenizer_change,
    )


def words_of(options: argparse.Namespace, config: Config, precision: str | None) -> TeacherWords:
    from megalite.evaluation.teacher_words import open_words

    output, vocabulary = Path(options.output), config.model.vocabulary
    return open_words(output, options.model, options.top_k, options.temperature, vocabulary, precision)


def model_axes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of the axes that split the model."""
    layout = layout_of(options, ("dp",))
    return {axis: size for axis, size in layout.items() if axis != "dp"}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank. Returns what is printed."""
    from megalite.assembly import parts as build
    from megalite.evaluation.preference_scores import Scorer, open_scores
    from megalite.evaluation.stored_passes import pass_config
    from megalite.evaluation.teacher_words import WordScorer
    from megalite.generation.sources import TIMEOUT, for_inference, open_source
    from megalite.launch.process import (
        choose_device,
        configure_process,
        exit_after_failure,
        start_process_group,
    )
    from megalite.parallel.collectives import CommunicationError

    device = choose_device()
    configure_process(device)
    start_process_group(device, TIMEOUT)
    source = open_source(options.model, base=options.base)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    config = for_inference(source.config, **model_axes(options), precision=precision)
    rows = rows_of(options, config)
    configs = [pass_config(config, files, rows) for files in passes_of(options)]
    try:
        mesh = build.make_mesh(configs[0])
        with progress_of(options.json or mesh.rank > 0) as progress:
            progress(f"opening {options.model}")
            if options.top_k is not None:
                words = words_of(options, config, precision)
                teacher = WordScorer(configs[0], source, mesh, device, options.top_k, options.temperature)
                for each in configs:
                    teacher.run(each, words, progress)
                return {"output": str(options.output), "rows": sum(each.rows for each in words.sets.values())}
            scores = open_scores(Path(options.output), options.model, precision)
            scorer = Scorer(configs[0], source, mesh, device)
            for each in configs:
                scorer.run(each, scores, progress)
    except CommunicationError as error:
        exit_after_failure(error)
    return {"output": str(options.output), "documents": sum(each.documents for each in scores.files.values())}
