"""Convert text to a token file: PREFIX.bin and PREFIX.idx (Megatron-LM's format) and PREFIX.json.

    megalite prepare --input book.txt --tokenizer byte --output data/book
    megalite prepare --input 'src/**/*.py' --train_tokenizer 4096 --output data/code
    megalite prepare --input hf:NAME --split train --tokenizer DIR --output data/name
    megalite prepare --chat --input chats.jsonl --tokenizer HF_DIR --output data/chats

Every document ends with EOS. A text file, a line of a .jsonl, an entry of a list of JSON or a row of a .csv
or .parquet is one document; empty and null texts are left out. Files may be compressed (gzip, bzip2, xz,
zstd). With --chat a record is a conversation in messages, ShareGPT, Alpaca or prompt-completion form, and
PREFIX.loss.bin and .idx mark the tokens that count in the loss.

With --skip_bad N up to N damaged lines, records that are no text or conversation, empty conversations,
conversations that the template refuses, and unreadable files are skipped and listed.

If PREFIX holds the same preparation already, inputs, tokenizer and options unchanged, nothing is done.
Another one is refused without --overwrite, which replaces it: models that were trained on it then no longer
fit.

A preparation that is killed (SIGTERM, SIGKILL, a lost machine) leaves hidden temporary files next to PREFIX:
the same command continues from them, another one for the same PREFIX removes them. An error or Ctrl-C removes
what was half-written.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from megalite.commands.parser import Parser, as_name, as_output, as_path, as_tokenizer, progress_of
from megalite.data.chat.record_hints import TEXT_KEY
from megalite.data.chat.records import RecordReader, parsed_keys
from megalite.data.chat.template import read_template
from megalite.data.indexed import DataError
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.prepare import PreparationSummary, prepare
from megalite.data.preparation.sources import InputSource, open_inputs
from megalite.data.preparation.tasks import SHOWN
from megalite.data.preparation.texts import Texts
from megalite.data.tokenizer.identity import place_of
from megalite.system.messages import counted

SPLIT = "train"


def parser() -> Parser:
    made = Parser(description=__doc__)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add = made.add_argument
    add(
        "--input",
        type=as_name,
        **several,
        required=True,
        metavar="PATH|GLOB|hf:NAME",
        help="input files; hf:NAME[:CONFIG] is loaded with `datasets`",
    )
    add(
        "--exclude",
        type=as_name,
        **several,
        default=[],
        metavar="PATTERN",
        help="skip files whose path matches, for example '*/tests/*'",
    )
    add(
        "--output",
        required=True,
        type=as_output,
        metavar="PREFIX",
        help="writes PREFIX.bin, PREFIX.idx and PREFIX.json",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace what PREFIX holds, and the file of a trained tokenizer",
    )
    add(
        "--tokenizer",
        type=as_tokenizer,
        metavar="byte|FILE.model|HF_DIR",
        help="bytes, a sentencepiece model, or a Hugging Face tokenizer directory",
    )
    add(
        "--train_tokenizer",
        type=int,
        metavar="VOCAB",
        help="first train a sentencepiece model (to --tokenizer or PREFIX.model)",
    )
    add(
        "--format",
        choices=["auto", "text", "jsonl", "csv", "parquet"],
        default="auto",
        help="format of the input files; auto: by suffix, and JSON by content",
    )
    add(
        "--text_key",
        metavar="KEY",
        help=f"key or column of the text in a record of JSON, .csv, .parquet or hf: (default {TEXT_KEY})",
    )
    add("--split", metavar="NAME", help=f"split of hf:NAME (default {SPLIT})")
    add(
        "--chat",
        action="store_true",
        help="the input contains conversations; their form is detected by their keys",
    )
    add(
        "--chat_template",
        type=as_path,
        metavar="FILE",
        help="Jinja source that replaces the tokenizer's own template; only with --chat",
    )
    add(
        "--loss_on",
        choices=["assistant", "last", "all"],
        default="assistant",
        help="turns that count in the loss (default assistant)",
    )
    add(
        "--end_of_turn",
        choices=["required", "optional"],
        default="required",
        help="optional: accept a chat template in which no token ends the assistant's turns, so that the "
        "model does not learn to stop",
    )
    add(
        "--max_length",
        type=int,
        metavar="N",
        help="maximum tokens per conversation; a run can use data.sequence_length + 1",
    )
    add(
        "--too_long",
        choices=["drop", "truncate"],
        default="drop",
        help="whether longer conversations are dropped or truncated at the end",
    )
    add(
        "--keys",
        metavar="KEY=NAME,…",
        help="names that keys have in the records, as messages=dialog,role=speaker; only with --chat",
    )
    add(
        "--other_parts",
        choices=["refuse", "drop"],
        default="refuse",
        help="parts of a message's content that are not text",
    )
    add(
        "--skip_bad",
        type=int,
        default=0,
        metavar="N",
        help="skip up to N damaged or unusable records and files (default 0)",
    )
    add(
        "--workers",
        type=int,
        metavar="N",
        help="tokenizing processes (default: the usable cores); the result does not depend on it",
    )
    add("--json", action="store_true", help="print only the result, as JSON, on stdout")
    return made


def main() -> None:
    tool = parser()
    options = tool.parse_args()
    started = time.monotonic()
    try:
        tokenizer, chat = chosen_tokenizer(options), chosen_chat(options)
        text_key = options.text_key or TEXT_KEY
        reading = {
            "file_format": options.format,
            "split": options.split or SPLIT,
            "skip_bad": options.skip_bad > 0,
            "note": say,
        }
        sources = open_inputs(
            options.input, exclude=options.exclude, text_key=text_key if chat is None else None, **reading
        )
        check_used(options, sources)
        with progress_of(options.json) as progress:
            summary = prepare(
                sources,
                options.output,
                tokenizer,
                chat or Texts(text_key, options.skip_bad),
                train_tokenizer=options.train_tokenizer,
                overwrite=options.overwrite,
                workers=options.workers,
                progress=progress,
                note=say,
            )
    except (DataError, OSError) as error:
        tool.error(error, options.output)
    report(summary, time.monotonic() - started, options.max_length, options.json)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_used(options: argparse.Namespace, sources: list[InputSource]) -> None:
    """Raise DataError if an option was given that no input has a use for."""
    if options.text_key is not None and not any(source.uses_text_key for source in sources):
        raise DataError(
            f"--text_key {options.text_key} names the text of a record, and the input is read as text alone. "
            "Leave it out, or give "
            "the format of the records with --format."
        )
    if options.split is not None and not any(name.startswith("hf:") for name in options.input):
        raise DataError(f"--split {options.split} belongs to hf:NAME, and no --input is one. Leave it out.")


def chosen_tokenizer(options: argparse.Namespace) -> str:
    """The tokenizer argument of `prepare`. Raises DataError if the options exclude each other."""
    if options.workers is not None and options.workers < 1:
        raise DataError(f"--workers {options.workers} must be at least 1.")
    if options.skip_bad < 0:
        raise DataError(f"--skip_bad {options.skip_bad} must be at least 0.")
    if options.output.is_dir() or not options.output.name:
        raise DataError(
            f"--output {options.output} is a directory. Give the start of a file name in it: "
            f"{options.output / 'train'}."
        )
    if options.train_tokenizer is None:
        if options.tokenizer is None:
            raise DataError(
                "--tokenizer is missing. Give byte, FILE.model or a Hugging Face directory, or "
                "--train_tokenizer VOCAB."
            )
        return str(place_of(options.tokenizer))
    if options.tokenizer is not None and not options.tokenizer.endswith(".model"):
        raise DataError(
            f"--tokenizer {options.tokenizer} does not end in .model, and --train_tokenizer writes one. "
            "Leave it out for PREFIX.model."
        )
    return options.tokenizer or f"{options.output}.model"


def chosen_chat(options: argparse.Namespace) -> Chats | None:
    """How conversations are tokenized; None for texts. Raises DataError if the options exclude each other."""
    if not options.chat:
        unset = {
            "chat_template": None,
            "max_length": None,
            "loss_on": "assistant",
            "end_of_turn": "required",
            "too_long": "drop",
            "keys": None,
            "other_parts": "refuse",
        }
        given = [f"--{name}" for name, value in unset.items() if getattr(options, name) != value]
        if given:
            raise DataError(f"{' and '.join(given)} belongs to chat data. Add --chat, or leave it out.")
        return None
    if options.text_key is not None:
        raise DataError(
            f"--text_key {options.text_key} belongs to texts. With --chat, --keys says what the keys of a "
            "record mean."
        )
    if options.train_tokenizer is not None:
        raise DataError(
            "--train_tokenizer learns from texts, and --chat needs the tokenizer of the model. Give it with "
            "--tokenizer."
        )
    if options.max_length is not None and options.max_length < 2:
        raise DataError(
            f"--max_length {options.max_length} leaves nothing to predict. Give data.sequence_length + 1."
        )
    if options.max_length is None and options.too_long == "truncate":
        raise DataError(
            "--too_long truncate cuts conversations of more than --max_length tokens, and there is none. "
            "Give it."
        )
    template = None if options.chat_template is None else read_template(options.chat_template)
    reader = RecordReader(parsed_keys(options.keys), options.other_parts == "drop")
    return Chats(
        template,
        options.loss_on,
        options.max_length,
        truncate=options.too_long == "truncate",
        reader=reader,
        skip_bad=options.skip_bad,
        require_end=options.end_of_turn == "required",
    )


def report(summary: PreparationSummary, seconds: float, longest: int | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(summary) | {"seconds": seconds}))
        return
    if summary.existing:
        size = f"{counted(summary.documents, 'document')}, {summary.tokens:,} tokens"
        print(
            f"{summary.prefix}: already prepared from these inputs with these options ({size}); --overwrite "
            "prepares it again"
        )
        return
    size = (
        f"{counted(summary.documents, 'document')}, {summary.tokens:,} tokens ({summary.dtype}), vocabulary "
        f"{summary.vocab_size:,}"
    )
    print(f"{summary.prefix}: {size}, {seconds:.1f} s")
    if summary.empty_documents:
        print(f"{summary.empty_documents:,} empty documents left out")
    if summary.forms:
        share, length = summary.loss_tokens / summary.tokens, (longest or summary.longest) - 1
        print(
            f"conversations ({', '.join(summary.forms)}): {summary.loss_tokens:,} tokens count "
            f"({share:.1%}), longest {summary.longest:,}"
        )
        print(
            f"with data.packing they fill {summary.packed_rows:,} rows of data.sequence_length {length:,}: "
            "that is an epoch"
        )
    for count, what in (
        (summary.too_long, "were longer than --max_length"),
        (summary.without_loss, "had nothing to learn from"),
    ):
        if count:
            print(f"{count:,} conversations {what}")
    if summary.skipped:
        listed = "".join(f"\n  {reason}" for reason in summary.skipped_first)
        print(
            f"{summary.skipped:,} bad records skipped, "
            f"{'the first ones' if summary.skipped > SHOWN else 'namely'}:{listed}"
        )
    if summary.replaced_documents:
        print(
            f"{summary.replaced_documents:,} documents contained bytes that are not UTF-8: each was replaced "
            "with U+FFFD"
        )
