"""Convert text to a token file: PREFIX.bin and PREFIX.idx (Megatron-LM's format) and PREFIX.json.

    megalite prepare --input book.txt --tokenizer byte --output data/book
    megalite prepare --input 'src/**/*.py' --train_tokenizer 4096 --output data/code
    megalite prepare --input hf:NAME --split train --tokenizer DIR --output data/name
    megalite prepare --chat --input chats.jsonl --tokenizer HF_DIR --output data/chats
    megalite prepare --preference --input preferences.jsonl --tokenizer HF_DIR --output data/pairs
    megalite prepare --input 'src/*.jsonl' --tokenizer DIR --output data/code --shard 3/8
    megalite prepare --input 'src/*.jsonl' --tokenizer DIR --output data/code --merge

Every document ends with EOS. A text file, a line of a .jsonl, an entry of a list of JSON or a row of a .csv
or .parquet is one document; empty and null texts are left out. Files may be compressed (gzip, bzip2, xz,
zstd). With --chat a record is a conversation in messages, ShareGPT, Alpaca or prompt-completion form, and
PREFIX.loss.bin and .idx mark the tokens that count in the loss. With --preference a record is a pair of a
chosen and a rejected completion, or a completion with a label; each completion becomes a document together
with its prompt.

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
from pathlib import Path
from typing import Any

from megalite.commands.parser import Parser, as_name, as_output, as_path, as_tokenizer, progress_of
from megalite.data.chat.preference_records import PreferenceReader
from megalite.data.chat.record_hints import TEXT_KEY
from megalite.data.chat.records import RecordReader, parsed_keys
from megalite.data.chat.template import read_template
from megalite.data.indexed import DataError
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.first_records import unknown_names
from megalite.data.preparation.preferences import PreferenceEncoder
from megalite.data.preparation.prepare import PreparationSummary, prepare
from megalite.data.preparation.shards import Merge, PreparationShard
from megalite.data.preparation.sources import InputSource, open_inputs
from megalite.data.preparation.tasks import SHOWN
from megalite.data.preparation.texts import Texts
from megalite.data.tokenizer.identity import place_of
from megalite.system.messages import counted

SPLIT = "train"


def parser() -> Parser:
    tool = Parser(description=__doc__)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add = tool.add_argument
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
        help="output path; writes PREFIX.bin, PREFIX.idx and PREFIX.json",
    )
    add(
        "--overwrite",
        action="store_true",
        help="overwrite the files of PREFIX and of a trained tokenizer",
    )
    add(
        "--tokenizer",
        type=as_tokenizer,
        metavar="byte|FILE.model|HF_DIR",
        help="byte, a sentencepiece model, or a Hugging Face tokenizer directory",
    )
    add(
        "--train_tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a sentencepiece model first (written to --tokenizer or PREFIX.model)",
    )
    add(
        "--format",
        choices=["auto", "text", "jsonl", "csv", "parquet"],
        default="auto",
        help="format of the input files; auto detects it from the suffix and, for JSON, the content",
    )
    add(
        "--text_key",
        metavar="KEY",
        help=f"key or column with the text in JSON, .csv, .parquet or hf: records (default {TEXT_KEY})",
    )
    add("--split", metavar="NAME", help=f"split of hf:NAME (default {SPLIT})")
    add(
        "--chat",
        action="store_true",
        help="the input contains conversations; their format is detected from their keys",
    )
    add(
        "--preference",
        nargs="?",
        const="auto",
        choices=["auto", "pairs", "labelled"],
        help="the input contains preferences: pairs of completions, or completions with a label; auto "
        "(default) detects which from the first record, and labelled also reads a pair as a good and a bad "
        "completion",
    )
    add(
        "--chat_template",
        type=as_path,
        metavar="FILE",
        help="Jinja source that replaces the tokenizer's own template; with --chat or --preference",
    )
    add(
        "--loss_on",
        choices=["assistant", "last", "all"],
        default="assistant",
        help="turns to include in the loss (default assistant); with --chat",
    )
    add(
        "--end_of_turn",
        choices=["required", "optional"],
        default="required",
        help="optional: accept a chat template without a token at the end of assistant turns; the model "
        "does not learn to stop; with --chat",
    )
    add(
        "--max_length",
        type=int,
        metavar="N",
        help="maximum tokens per conversation, or per completion with its prompt; a run can use "
        "data.sequence_length + 1, and for pairs half of data.sequence_length",
    )
    add(
        "--too_long",
        choices=["drop", "truncate", "keep_end", "truncate_prompt"],
        default="drop",
        help="whether longer conversations are dropped, truncated at the end or, with --preference, at the "
        "beginning (keep_end), or at the beginning of the prompt (truncate_prompt)",
    )
    add(
        "--keys",
        metavar="KEY=NAME,…",
        help="names of the keys in the records, for example messages=dialog,role=speaker; with --chat or "
        "--preference",
    )
    add(
        "--other_parts",
        choices=["refuse", "drop"],
        default="refuse",
        help="what to do with message parts that are not text",
    )
    add(
        "--skip_bad",
        type=int,
        default=0,
        metavar="N",
        help="skip up to N bad records and files (default 0)",
    )
    add(
        "--workers",
        type=int,
        metavar="N",
        help="number of tokenizing processes (default: available cores); does not affect the result",
    )
    add(
        "--shard",
        metavar="I/N",
        help="prepare the I-th of N parts of the input, in files beside those of PREFIX; each part may run "
        "on another machine",
    )
    add(
        "--merge",
        action="store_true",
        help="write PREFIX from its shards: the same command with this option in place of --shard",
    )
    add("--json", action="store_true", help="print only the result on stdout, as JSON")
    return tool


def main() -> None:
    tool = parser()
    options = tool.parse_args()
    started = time.monotonic()
    try:
        tokenizer, chat = chosen_tokenizer(options), chosen_preference(options) or chosen_chat(options)
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
        for line in unknown_names(sources, parsed_keys(options.keys)):
            say(line)
        with progress_of(options.json) as progress:
            summary = prepare(
                sources,
                chosen_part(options),
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
    report(summary, time.monotonic() - started, options.json, options.too_long)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_used(options: argparse.Namespace, sources: list[InputSource]) -> None:
    """Raise DataError if an option has no effect on any input."""
    if options.text_key is not None and not any(source.uses_text_key for source in sources):
        raise DataError(
            f"--text_key {options.text_key} has no effect on plain text input. Remove it, or set the "
            "format of the records with --format."
        )
    if options.split is not None and not any(name.startswith("hf:") for name in options.input):
        raise DataError(f"--split {options.split} requires an --input of the form hf:NAME. Remove --split.")


def chosen_tokenizer(options: argparse.Namespace) -> str:
    """Return the tokenizer argument of `prepare`. Raises DataError if options conflict."""
    if options.workers is not None and options.workers < 1:
        raise DataError(f"--workers must be at least 1, got {options.workers}.")
    if options.skip_bad < 0:
        raise DataError(f"--skip_bad must be at least 0, got {options.skip_bad}.")
    if options.output.is_dir() or not options.output.name:
        raise DataError(
            f"--output {options.output} is a directory. Add a file name prefix, for example "
            f"{options.output / 'train'}."
        )
    if options.train_tokenizer is None:
        if options.tokenizer is None:
            raise DataError(
                "--tokenizer is required: byte, FILE.model or a Hugging Face directory. To train one, pass "
                "--train_tokenizer VOCAB."
            )
        return str(place_of(options.tokenizer))
    if options.tokenizer is not None and not options.tokenizer.endswith(".model"):
        raise DataError(
            f"--tokenizer must end in .model with --train_tokenizer, got {options.tokenizer}. Remove "
            "--tokenizer to write PREFIX.model."
        )
    return options.tokenizer or f"{options.output}.model"


def chosen_part(options: argparse.Namespace) -> Path | PreparationShard | Merge:
    """Return what to write: PREFIX, or one of its shards, or PREFIX made of them. Raises DataError if options
    conflict."""
    if options.shard is None and not options.merge:
        return Path(options.output)
    if options.shard is not None and options.merge:
        raise DataError("--shard and --merge exclude each other. Remove one of them.")
    if options.train_tokenizer is not None:
        raise DataError(
            f"--train_tokenizer is not supported with {'--merge' if options.merge else '--shard'}. Train the "
            "tokenizer on a part of the input before, and pass it with --tokenizer."
        )
    whole = Path(options.output)
    return Merge(whole) if options.merge else PreparationShard.parsed(whole, options.shard)


def chosen_preference(options: argparse.Namespace) -> PreferenceEncoder | None:
    """Return how to tokenize preferences; None for other data. Raises DataError if options conflict."""
    if options.preference is None:
        return None
    if options.chat:
        raise DataError("--chat and --preference exclude each other. Remove one of them.")
    _check_set(options, {"loss_on": "assistant", "end_of_turn": "required"}, "--chat")
    _check_records(options, "--preference")
    return PreferenceEncoder(
        None if options.chat_template is None else read_template(options.chat_template),
        options.max_length,
        options.too_long,
        PreferenceReader(_reader(options), None if options.preference == "auto" else options.preference),
        options.skip_bad,
    )


def chosen_chat(options: argparse.Namespace) -> Chats | None:
    """Return how to tokenize conversations; None for texts. Raises DataError if options conflict."""
    if not options.chat:
        _check_set(options, {"loss_on": "assistant", "end_of_turn": "required"}, "--chat")
        unset = {"chat_template": None, "max_length": None, "too_long": "drop", "keys": None}
        _check_set(options, unset | {"other_parts": "refuse"}, "--chat or --preference")
        return None
    _check_records(options, "--chat")
    if options.too_long in ("keep_end", "truncate_prompt"):
        raise DataError(
            f"--too_long {options.too_long} can only be used with --preference. Use drop or truncate."
        )
    return Chats(
        None if options.chat_template is None else read_template(options.chat_template),
        options.loss_on,
        options.max_length,
        truncate=options.too_long == "truncate",
        reader=_reader(options),
        skip_bad=options.skip_bad,
        require_end=options.end_of_turn == "required",
    )


def _check_set(options: argparse.Namespace, unset: dict[str, Any], needed: str) -> None:
    """Raise DataError if an option is set that needs another one."""
    options_set = [f"--{name}" for name, value in unset.items() if getattr(options, name) != value]
    if options_set:
        raise DataError(
            f"{' and '.join(options_set)} can only be used with {needed}. Add {needed} or remove "
            f"{'it' if len(options_set) == 1 else 'them'}."
        )


def _check_records(options: argparse.Namespace, flag: str) -> None:
    """Raise DataError if options conflict with whole records, which `flag` asks for."""
    if options.text_key is not None:
        raise DataError(
            f"--text_key {options.text_key} is not supported with {flag}. Use --keys to rename the keys "
            "of the records."
        )
    if options.train_tokenizer is not None:
        raise DataError(
            f"--train_tokenizer is not supported with {flag}. Pass the tokenizer of the model with "
            "--tokenizer."
        )
    if options.max_length is not None and options.max_length < 2:
        raise DataError(
            f"--max_length must be at least 2, got {options.max_length}. Use data.sequence_length + 1."
        )
    if options.max_length is None and options.too_long != "drop":
        raise DataError(f"--too_long {options.too_long} requires --max_length.")


def _reader(options: argparse.Namespace) -> RecordReader:
    return RecordReader(parsed_keys(options.keys), options.other_parts == "drop")


def report(summary: PreparationSummary, seconds: float, as_json: bool, too_long: str = "drop") -> None:
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
        print(f"{summary.empty_documents:,} empty documents skipped")
    if summary.forms:
        print("\n".join(_about_conversations(summary)))
    noun = "preference" if summary.chosen + summary.rejected else "conversation"
    for count, what in (
        (summary.too_long, _about_too_long(summary, too_long)),
        (summary.without_loss, "without tokens in the loss: dropped"),
    ):
        if count:
            print(f"{counted(count, noun)} {what}")
    if summary.skipped:
        listed = "".join(f"\n  {reason}" for reason in summary.skipped_first)
        print(
            f"{summary.skipped:,} bad records skipped, "
            f"{'the first ones' if summary.skipped > SHOWN else 'namely'}:{listed}"
        )
    if summary.replaced_documents:
        print(
            f"{summary.replaced_documents:,} documents contain invalid UTF-8; each invalid byte was "
            "replaced with U+FFFD"
        )


def _about_too_long(summary: PreparationSummary, too_long: str) -> str:
    least = f" (at least {summary.shortest_too_long:,} tokens)" if summary.shortest_too_long else ""
    fate = "dropped; --too_long truncate keeps their beginning" if too_long == "drop" else "cut"
    return f"longer than --max_length{least}: {fate}"


def _about_conversations(summary: PreparationSummary) -> list[str]:
    """Return lines about conversations or preferences."""
    judged = summary.chosen + summary.rejected
    what, where = ("preferences", "completions") if judged else ("conversations", "the loss")
    share = summary.loss_tokens / summary.tokens
    lines = [
        f"{what} ({', '.join(summary.forms)}): {summary.loss_tokens:,} tokens in {where} "
        f"({share:.1%}), longest {summary.longest:,}",
        f"one epoch with data.packing: {counted(summary.packed_rows, 'row')} of data.sequence_length "
        f"{summary.row_length:,}",
    ]
    if judged:
        lines.insert(1, f"{summary.chosen:,} chosen or good, {summary.rejected:,} rejected or bad")
    if summary.equal:
        lines.append(
            f"WARNING: in {counted(summary.equal, 'pair')} chosen and rejected have the same tokens, from "
            "which nothing is learned"
        )
    return lines
