"""Evaluate a trained model: perplexity of texts, and the tasks of lm-evaluation-harness.

    megalite evaluate perplexity MODEL --text FILE … [--sequence_length N] [--stride N]
    megalite evaluate tasks MODEL --tasks NAME,… [--include_path DIR] [--num_fewshot N] [--limit N]

MODEL is a checkpoint (step_00000100) of any topology, a run's directory or configuration for its newest one,
or a Hugging Face model: its directory, or org/name on the Hub. With --tp, --pp and --cp it is distributed
over ranks, started by torchrun or else by this command. --ema takes the average of a run's weights.
docs/evaluation.md describes what is computed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from difflib import get_close_matches
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import CheckpointError
from megalite.commands.models import (
    add_average_option,
    add_base_option,
    add_layout_options,
    add_tokenizer_options,
    base_named,
    layout_of,
    weights_of,
)
from megalite.commands.parser import Parser, as_name, as_path, positive, progress_of, said, warn
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with
from megalite.config.rule import nearest_legal

COMMANDS = ("perplexity", "tasks")
Answer = tuple[dict[str, Any], list[str]]  # content for --json, lines of text

if TYPE_CHECKING:
    from megalite.data.tokenizer.tokenizers import Tokenizer
    from megalite.generation.language_model import LanguageModel
    from megalite.system.progress import Report


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        if get_close_matches(words[0], COMMANDS, n=1) and not Path(words[0]).exists():
            tool.error(
                f"unknown command {words[0]!r}; expected perplexity or "
                f"tasks.{nearest_legal(words[0], COMMANDS)}"
            )
        ways = (
            f"megalite evaluate perplexity {words[0]} --text FILE, or megalite evaluate tasks {words[0]} "
            "--tasks NAME"
        )
        tool.error(f"unknown command {words[0]!r}; expected perplexity or tasks. Use {ways}.")
    options = tool.parse_args(words)
    try:
        options.model, options.base = weights_of(options.model), base_named(options.base)
        ranks = check_ranks(options)
        if ranks > 1 and "WORLD_SIZE" not in os.environ:
            from megalite.launch.local_ranks import run_ranks

            return run_ranks(ranks, ["-m", "megalite", "evaluate", *words])
        with progress_of(options.json) as progress:
            content, lines = (perplexity if options.command == "perplexity" else tasks)(options, progress)
    except (CheckpointError, ConfigError, OSError) as error:
        exit_with(f"{tool.prog}: {said(error)}")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(content) if options.json else "\n".join(lines), flush=True)
    return 0


def parser() -> Parser:
    tool = Parser(description=__doc__)
    common = Parser(add_help=False)
    add = common.add_argument
    add("model", type=as_name, metavar="CHECKPOINT_DIR|RUN_DIR|hf:DIR|org/name", help="the model to evaluate")
    add_tokenizer_options(add)
    add_average_option(add)
    add_base_option(add)
    add("--batch_size", type=positive, default=8, metavar="N", help="rows per forward pass (default 8)")
    add_layout_options(add, positive, rows="row")
    add("--json", action="store_true", help="print only one JSON object on stdout")
    commands = tool.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    add = commands.add_parser(
        "perplexity", parents=[common], help="perplexity and bits per byte of text files"
    ).add_argument
    add(
        "--text",
        type=as_path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text files, each evaluated as one document",
    )
    add(
        "--sequence_length",
        type=positive,
        metavar="N",
        help="tokens per window (default: the training sequence length)",
    )
    add(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens predicted per window (default: half the sequence length)",
    )
    add = commands.add_parser("tasks", parents=[common], help="tasks of lm-evaluation-harness").add_argument
    add("--tasks", type=names, required=True, metavar="NAME,…", help="tasks, groups or tags of the harness")
    add("--include_path", type=as_path, metavar="DIR", help="directory with YAML files of additional tasks")
    add("--num_fewshot", type=int, metavar="N", help="number of few-shot examples (default: set by the task)")
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="maximum number of examples per task, for a quick test (default: all)",
    )
    return tool


def names(text: str) -> list[str]:
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of names")
    return listed


def check_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks.

    Raises ConfigError if the layout does not divide the model or does not match the started ranks.
    """
    layout = layout_of(options)
    ranks = prod(layout.values())
    if ranks > 1:
        from megalite.generation.sources import check_layout, for_inference, open_source

        source = open_source(options.model, options.ema, options.base)
        check_layout(for_inference(source.config, **layout))
    return ranks


def opened(options: argparse.Namespace, progress: Report) -> tuple[LanguageModel, Tokenizer]:
    """Load the model, distributed over the ranks, and its tokenizer."""
    progress(f"opening {options.model}")
    from megalite.generation.language_model import LanguageModel
    from megalite.generation.sources import TIMEOUT, open_source, tokenizer_of
    from megalite.launch.process import choose_device, configure_process, start_process_group

    device = choose_device()
    configure_process(device)
    start_process_group(device, TIMEOUT)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    source = open_source(options.model, options.ema, options.base)
    model = LanguageModel(source, device, **layout_of(options), precision=precision, progress=progress)
    return model, tokenizer_of(
        model.source, options.tokenizer, allow_change=options.allow_tokenizer_change, tell=warn
    )


def perplexity(options: argparse.Namespace, progress: Report) -> Answer:
    texts = [read(path) for path in options.text]
    from megalite.evaluation.harness import document_start
    from megalite.evaluation.perplexity import measure, together

    model, tokenizer = opened(options, progress)
    length, stride = lengths(options, model)
    start, measured = document_start(model.source, tokenizer), []
    requested = {"length": length, "stride": stride, "batch_size": options.batch_size}
    for path, text in zip(options.text, texts, strict=True):
        tokens, show = [start, *tokenizer.encode(text)], partial(progress, str(path), unit="windows")
        measured.append(
            measure(model, tokens, name=str(path), size=len(text.encode()), progress=show, **requested)
        )
    results = [text.as_json() for text in (*measured, *([together(measured)] if len(measured) > 1 else []))]
    lines = [
        f"{text['text']}: perplexity {text['perplexity']:.4f}, {text['bits_per_byte']:.4f} bits per byte "
        f"({text['tokens']:,} tokens, {text['bytes']:,} bytes)"
        for text in results
    ]
    settings: dict[str, Any] = {
        "sequence_length": length,
        "stride": stride,
        "tokenizer": tokenizer.name,
        "document_start": start,
    }
    return described(model, options) | settings | {"texts": results}, lines


def read(path: Path) -> str:
    """Read a text file without its byte-order mark, keeping newlines."""
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text {path} is not valid UTF-8 (at byte {error.start}). Convert the file to UTF-8."
        ) from None
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror or error}.") from None
    if not text:
        raise ConfigError(f"--text {path} is empty.")
    return text


def lengths(options: argparse.Namespace, model: LanguageModel) -> tuple[int, int]:
    """Return the window length and stride. Raises ConfigError if they do not fit the model."""
    trained = (
        min(model.config.data.sequence_length, model.longest) if model.config.data.train else model.longest
    )
    length = options.sequence_length or trained
    if length > model.longest:
        raise ConfigError(
            f"--sequence_length must be at most {model.longest}, the number of positions of the model, "
            f"got {length}."
        )
    stride = options.stride or max(1, length // 2)
    if stride > length:
        raise ConfigError(
            f"--stride must be at most the sequence length ({length}), got {stride}: a larger stride "
            "would skip tokens."
        )
    return length, stride


def tasks(options: argparse.Namespace, progress: Report) -> Answer:
    if options.include_path is not None and not options.include_path.is_dir():
        raise ConfigError(
            f"--include_path {options.include_path} is not a directory. Pass a directory with the YAML "
            "files of your tasks."
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise ConfigError(f"--num_fewshot must be non-negative, got {options.num_fewshot}.")
    from megalite.evaluation import harness

    harness_model = harness.as_harness_model()
    model, tokenizer = opened(options, progress)
    answers = harness_model(
        model, tokenizer, options.batch_size, partial(progress, "answering", unit="requests")
    )
    progress("reading the tasks")
    requested = {
        "include_path": options.include_path,
        "num_fewshot": options.num_fewshot,
        "limit": options.limit,
    }
    results = harness.run(answers, options.tasks, **requested)
    content: dict[str, Any] = {
        key: results[key]
        for key in ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        if key in results
    }
    return described(model, options) | {"tokenizer": tokenizer.name, **content}, table(results["results"])


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Format a line for each metric of each task.

    The harness names metrics METRIC,FILTER and METRIC_stderr,FILTER.
    """
    lines = []
    for task, figures in results.items():
        for name, value in figures.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{chosen}")
            spread = f" ± {error:.4f}" if isinstance(error, int | float) else ""
            lines.append(f"{task}: {metric}{'' if chosen == 'none' else f' ({chosen})'} {value:.4f}{spread}")
    return lines


def described(model: LanguageModel, options: argparse.Namespace) -> dict[str, Any]:
    description = {"model": model.source.name, "step": model.step, "precision": model.config.train.precision}
    return description | ({"ema": True} if options.ema else {})
