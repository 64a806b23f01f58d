"""Look into a token file: counts, lengths, duplicates, and documents with what counts in the loss.

    megalite data inspect data/chats
    megalite data inspect data/corpus --samples 10 --length 500
    megalite data inspect data/chats --document 17 --document 4000

Documents are numbered from 0. The tokenizer is the one that PREFIX.json names. What counts in the loss of a
conversation is green on a terminal, and elsewhere between ⟦ and ⟧, with its weight if that is not 1. Of
preferences the completion is marked, and a pair is shown as its prompt, the chosen and the rejected
completion.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.commands.parser import Answer, Parser, answer, as_name, as_tokenizer, positive, progress_of
from megalite.data.indexed import DataError
from megalite.data.inspection import Inspection, ShownDocument, TextPart, as_json
from megalite.system.messages import counted

BAR = 40  # characters of the longest bar


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    return answer(tool, tool.parse_args(argv), {"inspect": inspect}, DataError)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    commands = tool.add_subparsers(dest="command", required=True, metavar="inspect")
    add = commands.add_parser("inspect", help="print the contents of a token file").add_argument
    add("prefix", type=as_name, metavar="PREFIX", help="path of the token file, without .bin or .idx")
    add(
        "--samples",
        type=int,
        default=3,
        metavar="N",
        help="number of documents to show, evenly spaced (default 3)",
    )
    add(
        "--document",
        type=int,
        action="append",
        metavar="I",
        help="show this document instead; may be repeated",
    )
    add("--longest", type=int, default=5, metavar="N", help="number of longest documents to list (default 5)")
    add("--length", type=positive, default=200, metavar="N", help="tokens to show per document (default 200)")
    add(
        "--tokenizer",
        type=as_tokenizer,
        metavar="byte|FILE.model|HF_DIR",
        help="tokenizer to decode with (default: the one named in PREFIX.json)",
    )
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def inspect(options: argparse.Namespace) -> Answer:
    inspection = Inspection(options.prefix, options.tokenizer)
    shown = (
        inspection.decoded(options.document, options.length)
        if options.document
        else inspection.samples(options.samples, options.length)
    )
    longest = inspection.longest(options.longest, 30)
    with progress_of(options.json) as progress:
        progress(f"reading {options.prefix}")
        facts = inspection.facts() | {"tokenizer_problem": inspection.problem}
    content = facts | {"samples": as_json(shown), "longest": as_json(longest)}
    return content, [] if options.json else lines_of(facts, shown, longest), 0


def lines_of(facts: dict[str, Any], samples: list[ShownDocument], longest: list[ShownDocument]) -> list[str]:
    """Format the report, with colors if stdout is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as captured:
        console.print("\n".join(_counts(facts)), markup=False, soft_wrap=True)
        console.print(Text.assemble("\n", ("documents by length in tokens", "bold")), soft_wrap=True)
        for bin_ in facts["histogram"]:
            bar = "█" * -(-BAR * bin_["documents"] // max(each["documents"] for each in facts["histogram"]))
            label = f"{bin_['from']:>9,} to {bin_['to']:>9,} {bin_['documents']:>11,} "
            share = f" {bin_['tokens'] / max(1, facts['tokens']):.1%} of the tokens"
            console.print(Text.assemble(label, (bar, "cyan"), share), soft_wrap=True)
        if facts["kind"] == "pairs":
            for pair in zip(samples[::2], samples[1::2], strict=True):
                console.print(_pair(*pair, console.is_terminal), soft_wrap=True)
        else:
            for sample in samples:
                console.print(_document(sample, facts["kind"], console.is_terminal), soft_wrap=True)
        console.print(Text.assemble("\n", ("longest documents", "bold")), soft_wrap=True)
        for sample in longest:
            beginning = " ".join("".join(part.text for part in sample.parts).split())[:60]
            console.print(
                f"{sample.document:>9,} {sample.tokens:>11,} tokens  {beginning}",
                markup=False,
                soft_wrap=True,
            )
    return captured.get().splitlines()


def _document(sample: ShownDocument, kind: str, color: bool) -> Any:
    """Format a document with a heading."""
    from rich.text import Text

    heading = f"document {sample.document:,}: {sample.tokens:,} tokens"
    if kind == "chat":
        heading += f", {sample.loss_tokens:,} in the loss"
    elif sample.chosen is not None:
        heading += f", {sample.loss_tokens:,} in the {'good' if sample.chosen else 'bad'} completion"
    if sample.shown < sample.tokens:
        what = f"the first {sample.shown:,}" if sample.chosen is None else f"{sample.shown:,} of them"
        heading += f", showing {what}"
    text = Text.assemble("\n", (heading, "bold"), "\n")
    return text.append(_marked(sample.parts if kind != "text" else _unmarked(sample), color))


def _pair(chosen: ShownDocument, rejected: ShownDocument, color: bool) -> Any:
    """Format a pair: the prompt, unless the halves were cut to different ones, and both completions."""
    from rich.text import Text

    heading = (
        f"pair {chosen.document // 2:,}, documents {chosen.document:,} and {rejected.document:,}: "
        f"{chosen.tokens:,} and {rejected.tokens:,} tokens, {chosen.loss_tokens:,} and "
        f"{rejected.loss_tokens:,} in the completions"
    )
    text = Text.assemble("\n", (heading, "bold"), "\n")
    prompts = [[part for part in half.parts if not part.counts] for half in (chosen, rejected)]
    if shared := prompts[0] == prompts[1]:
        text.append(_marked(prompts[0], color))
    for name, half in (("chosen", chosen), ("rejected", rejected)):
        parts = [part for part in half.parts if part.counts] if shared else half.parts
        text.append(Text.assemble("\n", (f"{name}: ", "bold"))).append(_marked(parts, color))
    return text


def _unmarked(sample: ShownDocument) -> list[TextPart]:
    return [replace(part, counts=False) for part in sample.parts]


def _marked(parts: Sequence[TextPart], color: bool) -> Any:
    """Format text. Tokens in the loss are green, or in brackets."""
    from rich.text import Text

    text = Text()
    for part in parts:
        weight = f"×{part.weight:g}" if part.counts and part.weight != 1 else ""
        text.append(
            f"⟦{part.text}⟧" if part.counts and not color else part.text, "green" if part.counts else ""
        )
        text.append(weight, "cyan")
    return text


def _counts(facts: dict[str, Any]) -> list[str]:
    lengths, size = facts["lengths"], f"{facts['dtype']}, {facts['bytes'] / 1e6:,.1f} MB"
    lines = [
        f"{facts['prefix']}: {counted(facts['documents'], 'document')}, {facts['tokens']:,} tokens ({size})",
        f"lengths: {lengths['min']:,.0f} to {lengths['max']:,.0f}, median {lengths['median']:,.0f}, mean "
        f"{lengths['mean']:,.1f}, "
        f"95 % up to {lengths['p95']:,.0f}",
        f"duplicates: {facts['duplicates']:,} documents repeat an earlier one "
        f"({facts['duplicate_share']:.1%})",
        f"vocabulary: {_number(facts['vocab_size'])}, largest token {facts['largest_id']:,}, EOS "
        f"{_number(facts['eos'])}",
    ]
    if facts["vocab_size"] is not None and facts["largest_id"] >= facts["vocab_size"]:
        lines.append("warning: some tokens are outside the vocabulary; the .bin and .json files do not match")
    if facts["kind"] != "text":
        where = "the loss" if facts["kind"] == "chat" else "completions"
        lines.append(
            f"conversations ({', '.join(facts['forms'] or [])}): {facts['loss_tokens']:,} tokens in {where} "
            f"({facts['loss_tokens'] / max(1, facts['tokens']):.1%}), {facts['without_loss']:,} "
            "documents have none"
        )
        lines += _about_loss(facts)
    elif facts["without_eos"]:
        lines.append(f"{facts['without_eos']:,} documents do not end in EOS")
    if facts["tokenizer_problem"]:
        lines.append(f"tokens are shown as numbers: {facts['tokenizer_problem']}")
    return lines


def _about_loss(facts: dict[str, Any]) -> list[str]:
    """Return lines about weights and preferences."""
    lines = []
    if "weights" in facts:
        lowest, highest = facts["weights"]
        lines.append(f"weights of tokens: from {lowest:g} to {highest:g}")
    if "chosen" in facts:
        names = ("chosen", "rejected") if facts["kind"] == "pairs" else ("good", "bad")
        lines.append(
            f"preferences ({facts['kind']}): {facts['chosen']:,} {names[0]}, {facts['rejected']:,} {names[1]}"
        )
    return lines


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
