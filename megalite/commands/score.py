"""Compute the log-probabilities of the completions of preferences once, as the reference of later runs.

    megalite score hf:models/llama --data data/pairs --output scores/pairs [--tp 2 --pp 2 --dp 2]
    megalite train … --train.objective dpo --preference.reference scores:scores/pairs

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
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.commands.models import add_layout_options, layout_of, weights_of
from megalite.commands.parser import Parser, as_name, as_path, positive, progress_of, said, warn
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    words = sys.argv[1:] if argv is None else argv
    options = tool.parse_args(words)
    try:
        options.model, options.data = weights_of(options.model), [*map(str, options.data)]
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
        line = f"{options.output}: {facts['documents']:,} completions"
        print(json.dumps(facts) if options.json else line, flush=True)
    return 0


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add("model", type=as_name, metavar="CHECKPOINT_DIR|RUN_DIR|hf:DIR|org/name", help="the model")
    add("--data", type=as_path, nargs="+", required=True, metavar="PREFIX", help="token files of preferences")
    add("--output", type=as_path, required=True, metavar="DIR", help="directory of the scores")
    add("--dp", type=positive, default=1, help="data-parallel ranks (default 1)")
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
        help="tokens per row (default: 2048, or the longest pair)",
    )
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def check(options: argparse.Namespace) -> list[str]:
    """Raise CheckpointError or ConfigError for errors that every rank would hit, before any rank is started.

    Returns:
        lines for the user about tokenizers.
    """
    from megalite.evaluation.preference_scores import check_tokenizer, length_of, open_scores
    from megalite.generation.sources import check_layout, for_inference, open_source

    source = open_source(options.model)
    config = for_inference(source.config, **model_axes(options))
    check_layout(replace(config, parallel=replace(config.parallel, dp=options.dp)))
    length_of(options.data, config.model.max_position_embeddings, options.sequence_length)
    allow = options.allow_tokenizer_change
    notes = [line for prefix in options.data for line in check_tokenizer(prefix, source, allow)]
    if os.environ.get("RANK", "0") == "0":
        open_scores(Path(options.output), options.model)
    return notes


def model_axes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of the axes that split the model."""
    layout = layout_of(options, ("dp",))
    return {axis: size for axis, size in layout.items() if axis != "dp"}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank. Returns what is printed."""
    from megalite.assembly import parts as build
    from megalite.evaluation.preference_scores import (
        Scorer,
        ScoringLayout,
        length_of,
        open_scores,
        scoring_config,
    )
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
    source = open_source(options.model)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    config = for_inference(source.config, **model_axes(options), precision=precision)
    length = length_of(options.data, config.model.max_position_embeddings, options.sequence_length)
    layout = ScoringLayout(options.dp, options.micro_batch_size, length)
    configs = [scoring_config(config, prefix, layout) for prefix in options.data]
    try:
        mesh = build.make_mesh(configs[0])
        with progress_of(options.json or mesh.rank > 0) as progress:
            progress(f"opening {options.model}")
            scores = open_scores(Path(options.output), options.model)
            scorer = Scorer(configs[0], source, mesh, device)
            for each in configs:
                scorer.config = each
                scorer.run(scores, progress)
    except CommunicationError as error:
        exit_after_failure(error)
    return {"output": str(options.output), "documents": sum(each.documents for each in scores.files.values())}
