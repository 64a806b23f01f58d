"""Continue a text with a trained model.

    python tools/generate.py runs/quickstart --prompt 'def main(' [--tokens 100 --temperature 0.8 --top_k 50 --seed 0]

Takes a checkpoint (step_00000100), or a run's directory for its newest one, whatever topology wrote it, and runs in one process. Prints
the continuation alone; it ends after --tokens tokens, or where the model ends the document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.checkpoint import CheckpointError
from megalite.config.schema import ConfigError
from tools import Parser

if TYPE_CHECKING:
    from tools.generating import LanguageModel
    from tools.tokenizing import Tokenizer


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    if options.tokens < 1:
        tool.error(f"--tokens {options.tokens}: there must be at least one token to generate.")
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        tool.error(f"--temperature {options.temperature} is not a number from 0 up. 0 always takes the most likely token.")
    if options.top_k < 0:
        tool.error(f"--top_k {options.top_k} is negative. Give the number of tokens to draw among, or 0 for all.")
    try:
        result = run(options)
    except (CheckpointError, ConfigError, OSError) as error:
        tool.error(str(error))
    print(json.dumps(result) if options.json else result["continuation"])


def parser() -> Parser:
    made = Parser(prog="generate.py", description=__doc__)
    add = made.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="a checkpoint, or the directory of a run")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue; empty starts a document")
    add("--tokens", type=int, default=100, help="at most so many tokens (default 100)")
    add("--temperature", type=float, default=0.8, help="0 always takes the most likely token (default 0.8)")
    add("--top_k", type=int, default=50, help="draw among so many most likely tokens, 0 among all (default 50)")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--tokenizer", metavar="byte|FILE.model|HF_DIR", help="instead of the one that made the training data")
    add("--json", action="store_true", help="print one JSON object, and nothing else, on stdout")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The continuation and what belongs to it."""
    from megalite.training.launch import choose_device, configure_process
    from tools.generating import LanguageModel, Sampling
    from tools.inspecting import find

    device = choose_device()
    configure_process(device)
    directory = find(options.checkpoint)
    model = LanguageModel(directory, device)
    tokenizer = tokenizer_of(model, options.tokenizer)
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eos]
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    started = perf_counter()
    tokens = model.generate(prompt, options.tokens, sampling, eos=tokenizer.eos, vocab_size=tokenizer.vocab_size)
    seconds = perf_counter() - started
    return {
        "checkpoint": str(directory),
        "step": model.step,
        "prompt": options.prompt,
        "continuation": tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :],  # alone it may lose its leading space
        "tokens": tokens,
        "ended_document": tokens[-1] == tokenizer.eos,
        "tokens_per_second": len(tokens) / seconds,
    }


def tokenizer_of(model: LanguageModel, name: str | None) -> Tokenizer:
    """The tokenizer that is given by name, or that of the training data. Raises ConfigError where there is none or it does not fit."""
    from tools import tokenizing
    from tools.generating import tokenizer_prefix

    prefix = tokenizer_prefix(model.config)
    if name is not None:
        found = tokenizing.load(name)
    elif prefix is None:
        raise ConfigError("the checkpoint names no training data, so its tokenizer is unknown. Give it with --tokenizer.")
    else:
        try:
            found = tokenizing.load_for(prefix)
        except ConfigError as error:
            raise ConfigError(f"the training data's tokenizer can not be read: {error} Or give it with --tokenizer.") from None
    if found.vocab_size > model.config.model.vocabulary:
        raise ConfigError(
            f"the tokenizer {found.name} has {found.vocab_size} tokens, the model only {model.config.model.vocabulary}. "
            "Give the one that made its training data with --tokenizer."
        )
    return found


if __name__ == "__main__":
    main()
