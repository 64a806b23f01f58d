"""The parser that the commands share: an unknown option, value or subcommand is one message that names the nearest."""

import argparse

import pytest

from megalite.commands import bubble, evaluate, plan, verify
from megalite.commands.parser import Parser

GIVEN = "--pp 2 --microbatches 4"


@pytest.mark.parametrize(
    "command, argv, nearest",
    [
        (bubble.main, f"--schedule interleave {GIVEN}", "interleaved"),
        (bubble.main, f"--schdule 1f1b {GIVEN}", "--schedule"),
        (plan.main, "--offload cpus", "cpu"),
        (plan.main, "--zero 4", "3"),
        (plan.main, "--sequence-lenght 4", "--sequence_length"),
        (evaluate.main, "perplexity runs/a --text a.txt --strides 3", "--stride"),
        (evaluate.main, "perplexty runs/a --text a.txt", "perplexity"),
        (verify.main, "--stps 3 --config quickstart", "--steps"),
    ],
)
def test_the_nearest_is_named(command, argv, nearest, capsys):
    with pytest.raises(SystemExit) as ended:
        command(argv.split())
    said = capsys.readouterr()
    assert (
        ended.value.code == 2
        and said.out == ""
        and said.err.endswith(f"Nearest: {nearest}.\n")
        and said.err.count("\n") == 1
    )


def test_a_subcommand_and_its_options_have_nearest_ones_too(capsys):
    tool = Parser(prog="tool")
    commands = tool.add_subparsers(dest="command", metavar="list|verify")
    commands.add_parser("list").add_argument("--depth", type=int)
    commands.add_parser("verify")
    assert tool.parse_args(["list", "--depth", "2"]) == argparse.Namespace(command="list", depth=2)
    for argv, said in (
        (["lst"], "tool: 'lst' is not a tool command. Commands: list, verify. Nearest: list."),
        (["runs/a"], "tool: 'runs/a' is not a tool command. Commands: list, verify."),
        (["list", "--dpth=2"], "--dpth=2. Nearest: --depth."),
        (["list", "--quiet"], "unrecognized arguments: --quiet"),
    ):
        with pytest.raises(SystemExit):
            tool.parse_args(argv)
        assert capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize("size", ["--tp 2", "--parallel.tp 2", "--parallel.tp=2"])
def test_verify_starts_the_ranks_of_a_layout_under_either_name(size, capsys):
    """It fails on the data, which is not there, and not on a number of ranks that does not fit."""
    with pytest.raises(SystemExit):
        verify.main([*size.split(), "--model.preset", "tiny", "--data.train", "nowhere"])
    assert capsys.readouterr().err.startswith("data.train = nowhere does not exist")


def test_no_nearest_is_named_where_there_is_no_other(capsys):
    tool = Parser(prog="tool")
    tool.add_argument("--bits", type=float, choices=[4.0])
    with pytest.raises(SystemExit):
        tool.parse_args(["--bits", "nan"])
    assert capsys.readouterr().err.endswith("invalid choice: nan (choose from 4.0).\n")
