"""Continue texts with a trained model.

    megalite generate runs/quickstart --prompt 'def main(' [--tokens 100 --temperature 0.8 --top_k 50]
    megalite generate hf:DIR --prompts FILE --tp 2 --pp 2 --json
    megalite generate hf:DIR --chat [--system TEXT]

The model is a checkpoint (step_00000100) of any topology, a run's directory or configuration for its newest
one, or a Hugging Face model: its directory, or org/name on the Hub. Prints only the continuation, which ends
after --tokens tokens, before a --stop text, or where the model ends the document. With --tp, --pp and --cp
the model is distributed over ranks, started by torchrun or else by this command. --cp splits the reading of
long prompts. --ema takes the average of a run's weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import CheckpointError
from megalite.commands.models import (
    AXES,
    add_average_option,
    add_base_option,
    add_layout_options,
    add_tokenizer_options,
    base_named,
    layout_of,
    weights_of,
)
from megalite.commands.parser import Parser, as_name, as_path, progress_of, said, warn
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with
from megalite.data.lone_surrogates import parsed, whole

if TYPE_CHECKING:
    from megalite.data.tokenizer.tokenizers import Tokenizer
    from megalite.generation.language_model import LanguageModel, Sampling
    from megalite.generation.text import Reply

SHOWN = 60  # characters of a prompt that are printed before its continuation, if there are several


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    words = sys.argv[1:] if argv is None else argv
    options = tool.parse_args(words)
    try:
        check(options)
        options.model, options.base = weights_of(options.model), base_named(options.base)
        ranks = math.prod(layout_of(options).values())
        if ranks > 1 and "WORLD_SIZE" not in os.environ:
            check_source(options)
            from megalite.launch.local_ranks import run_ranks

            return run_ranks(ranks, ["-m", "megalite", "generate", *words])
        run(options)
    except (CheckpointError, ConfigError, OSError) as error:
        exit_with(f"{tool.prog}: {said(error)}")
    return 0


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add("model", type=as_name, metavar="CHECKPOINT_DIR|RUN_DIR|hf:DIR|org/name", help="the model")
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; an empty text starts a new document. Repeat for a batch of prompts",
    )
    add(
        "--prompts",
        type=as_path,
        metavar="FILE",
        help="file with one prompt per line; in FILE.jsonl, a string or an object with the key `prompt`",
    )
    add(
        "--chat",
        action="store_true",
        help="chat with the model, one message per input line, until the end of the input",
    )
    add(
        "--chat_template",
        type=as_path,
        metavar="FILE",
        help="Jinja source that replaces the chat template of the training data or the tokenizer",
    )
    add("--system", metavar="TEXT", help="system message of the chat")
    add_average_option(add)
    add_base_option(add)
    add("--tokens", type=int, default=100, help="maximum number of new tokens (default 100)")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy (default 0.8)")
    add(
        "--top_k",
        type=int,
        default=50,
        help="sample from the K most likely tokens; 0: all tokens (default 50)",
    )
    add(
        "--top_p",
        type=float,
        default=1.0,
        help="sample from the smallest set of tokens with this total probability (default 1)",
    )
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add_tokenizer_options(add)
    add_layout_options(add, int, rows="prompt")
    add(
        "--prefill_chunk_size",
        type=int,
        metavar="N",
        help="process prompts in chunks of N positions, which bounds the memory of their activations "
        "(default: whole)",
    )
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as it is generated (default: on a terminal with a single prompt)",
    )
    add(
        "--json",
        action="store_true",
        help="print only one JSON object on stdout, or a list of them for several prompts",
    )
    return tool


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for invalid options, checked without the model."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    need(options.tokens >= 1, f"--tokens must be at least 1, got {options.tokens}.")
    temperature = options.temperature
    need(
        math.isfinite(temperature) and temperature >= 0,
        f"--temperature must be a non-negative number, got {temperature}. Use 0 for greedy decoding.",
    )
    need(
        options.top_k >= 0,
        f"--top_k must be non-negative, got {options.top_k}. Use 0 to sample from all tokens.",
    )
    need(
        0 < options.top_p <= 1,
        f"--top_p must be in (0, 1], got {options.top_p}. Use 1 to sample from all tokens.",
    )
    need("" not in options.stop, "--stop must not be empty.")
    chunk = options.prefill_chunk_size
    need(
        chunk is None or chunk >= 1,
        f"--prefill_chunk_size must be at least 1, got {chunk}. Omit it to process whole prompts at once.",
    )
    for axis in AXES:
        need(getattr(options, axis) >= 1, f"--{axis} must be at least 1, got {getattr(options, axis)}.")
    inputs = (options.prompt is not None) + (options.prompts is not None) + options.chat
    need(
        inputs == 1,
        f"--prompt, --prompts and --chat are mutually exclusive and one is required, got {inputs} of them.",
    )
    for name in ("system", "chat_template"):
        need(getattr(options, name) is None or options.chat, f"--{name} requires --chat.")
    need(
        not (options.json and (options.chat or options.stream)),
        "--json is not supported with --chat or --stream. Remove one of them.",
    )
    layout_of(options)


def check_source(options: argparse.Namespace) -> None:
    """Raise CheckpointError or ConfigError for errors that every rank would hit, before any rank is
    started."""
    from megalite.generation.sources import check_layout, for_inference, open_source

    source = open_source(options.model, options.ema, options.base)
    check_layout(for_inference(source.config, **layout_of(options)))
    prompts_of(options)


def run(options: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints."""
    from megalite.generation.language_model import LanguageModel, Sampling
    from megalite.generation.sources import TIMEOUT, open_source, tokenizer_of
    from megalite.launch.process import (
        choose_device,
        configure_process,
        exit_after_failure,
        start_process_group,
    )
    from megalite.parallel.collectives import CommunicationError

    prompts = prompts_of(options)
    device = choose_device()
    configure_process(device)
    start_process_group(device, TIMEOUT)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    try:
        with progress_of(options.json) as progress:
            progress(f"opening {options.model}")
            model = LanguageModel(
                open_source(options.model, options.ema, options.base),
                device,
                **layout_of(options),
                precision=precision,
                progress=progress,
            )
        model.prefill_chunk_size = options.prefill_chunk_size
        tokenizer = tokenizer_of(
            model.source, options.tokenizer, allow_change=options.allow_tokenizer_change, tell=warn
        )
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        if options.chat:
            chat(options, model, tokenizer, sampling)
        else:
            write(options, model, tokenizer, sampling, prompts)
    except CommunicationError as error:
        exit_after_failure(error)


def prompts_of(options: argparse.Namespace) -> list[str]:
    """Return the prompts. Raises ConfigError if their file cannot be parsed."""
    path: Path | None = options.prompts
    if path is None:
        return [whole(prompt)[0] for prompt in options.prompt or []]  # of a command line that is not UTF-8
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        records = [line.removesuffix("\r") for line in lines if line.strip()]
        if path.suffix == ".jsonl":
            records = [
                record["prompt"] if isinstance(record, dict) else record for record, _ in map(parsed, records)
            ]
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, RecursionError) as error:
        way = "a JSON string or an object with the key `prompt`" if path.suffix == ".jsonl" else "UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read: {error!r}. Each line must be {way}.") from None
    if not records or not all(isinstance(record, str) for record in records):
        raise ConfigError(
            f"--prompts {path} {'is empty' if not records else 'contains a prompt that is not a string'}. "
            "Each line must be a prompt."
        )
    return records


def chat(options: argparse.Namespace, model: LanguageModel, tokenizer: Tokenizer, sampling: Sampling) -> None:
    from megalite.generation.chat import converse
    from megalite.generation.sources import chat_template, end_tokens

    template = chat_template(model.source, tokenizer, options.tokenizer is not None, options.chat_template)
    ends, show = end_tokens(model.source, tokenizer), printer(model)
    settings: dict[str, Any] = {
        "ends": ends,
        "stops": options.stop,
        "system": options.system and whole(options.system)[0],
    }
    converse(model, tokenizer, template, options.tokens, sampling, show=show, **settings)


def write(
    options: argparse.Namespace,
    model: LanguageModel,
    tokenizer: Tokenizer,
    sampling: Sampling,
    prompts: list[str],
) -> None:
    """Continue the prompts, and print the continuations: as they are generated, at the end, or as JSON."""
    from megalite.generation.sources import end_tokens, opening
    from megalite.generation.text import reply_to

    ends, before, show = end_tokens(model.source, tokenizer), opening(model.source, tokenizer), printer(model)
    streams = (
        sys.stdout.isatty() and not options.json and len(prompts) == 1
        if options.stream is None
        else options.stream
    )
    if streams and len(prompts) > 1:
        raise ConfigError(f"--stream supports a single prompt, got {len(prompts)}. Remove --stream.")
    rows = [(before + tokenizer.encode(prompt)) or [tokenizer.eos] for prompt in prompts]
    for number, row in enumerate(rows, start=1):
        if len(row) > model.longest:
            warn(
                f"prompt {number} has {len(row):,} tokens; only the last {model.longest:,} are read "
                "(model.max_position_embeddings)"
            )
    started = perf_counter()
    shown = {"show": show} if streams else {}
    replies = reply_to(
        model, tokenizer, rows, options.tokens, sampling, ends=ends, stops=options.stop, **shown
    )
    seconds = perf_counter() - started
    average = {"ema": True} if options.ema else {}
    results = [described(model, *each, seconds) | average for each in zip(prompts, replies, strict=True)]
    if options.json:
        show(json.dumps(results[0] if len(results) == 1 else results) + "\n")
    elif streams:
        show("\n")
    elif len(results) == 1:
        show(replies[0].text + "\n")
    else:
        show(
            "".join(
                f"--- {prompt[:SHOWN]!r}\n{reply.text}\n"
                for prompt, reply in zip(prompts, replies, strict=True)
            )
        )


def described(model: LanguageModel, prompt: str, reply: Reply, seconds: float) -> dict[str, Any]:
    return {
        "checkpoint": model.source.name,
        "step": model.step,
        "prompt": prompt,
        "continuation": reply.text,
        "tokens": reply.tokens,
        "ended_document": reply.ended,
        "stopped": reply.stopped,
        "tokens_per_second": len(reply.tokens) / seconds,
    }


def printer(model: LanguageModel) -> Callable[[str], object]:
    """Return a function that prints text at once on rank 0 and does nothing on other ranks."""
    return (lambda piece: print(piece, end="", flush=True)) if model.mesh.rank == 0 else (lambda piece: None)
