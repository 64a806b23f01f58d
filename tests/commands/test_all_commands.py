"""What every command has in common: help that fits, the nearest name, answers without torch, outputs that are checked
first, --json."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megalite.commands.start import COMMANDS
from tests.commands.full_disk import no_room
from tests.commands.permissions import permissions_count
from tests.support.configs import write_tokens

GONE = "./no/gone"
MISSING: dict[str, tuple[list[str], str]] = {
    "plan": (["--model", GONE, "--gpus", "8"], "--model ./no/gone is not a known model"),
    "init": (["--from", GONE], "--from ./no/gone is not a known model"),
    "launch": (["--on", "slurm", "--config", "gone.yaml"], "--config = gone.yaml cannot be read: No such file"),
    "train": (["--config", "gone.yaml"], "--config = gone.yaml cannot be read: No such file"),
    "verify": (["--config", "gone.yaml"], "--config = gone.yaml cannot be read: No such file"),
    "prepare": (["--input", GONE, "--tokenizer", "byte", "--output", "x"], "--input ./no/gone does not exist"),
    "prepare, tokenizer": (
        ["--input", "text", "--tokenizer", GONE, "--output", "x"],
        "--tokenizer ./no/gone does not exist",
    ),
    "data": (["inspect", GONE], "no/gone.idx is missing"),
    "convert": (["import", GONE, "x"], "no/gone/config.json could not be read"),
    "convert, out": (["export", GONE, "x"], "no/gone is not a checkpoint: the directory does not exist"),
    "convert, adapter": (["adapter-export", GONE, "x"], "no/gone is not a checkpoint: the directory does not exist"),
    "convert, loftq": (["loftq", GONE, "x", "--rank", "4"], "no/gone/config.json could not be read"),
    "convert, check": (["check", GONE, "x"], "no/gone is not a checkpoint: the directory does not exist"),
    "convert, taken": (["import", "model", "taken"], "taken already exists. Choose another path"),
    "generate": ([GONE, "--prompt", "a"], "no/gone is not a checkpoint: the directory does not exist"),
    "generate, hf": ([f"hf:{GONE}", "--prompt", "a"], "no/gone/config.json could not be read"),
    "evaluate": (["perplexity", GONE, "--text", "text"], "no/gone is not a checkpoint: the directory does not exist"),
    "evaluate, text": (["perplexity", "hf:model", "--text", GONE], "--text no/gone cannot be read: No such file"),
    "checkpoint": (["verify", GONE], "no/gone is not a checkpoint: the directory does not exist"),
    "report": ([GONE], "Could not read no/gone/config.yaml: No such file"),
    "compare": ([GONE, "model"], "Could not read no/gone/config.yaml: No such file"),
    "timeline": ([GONE], "Could not read no/gone/config.yaml: No such file"),
    "explain": ([GONE], "no records found in no/gone/stalls"),
    "import-config": ([GONE], "./no/gone cannot be read: No such file"),
    "bubble": (["--from_run", GONE], "no/gone/traces/timeline.json: No such file"),
}
"""Command → what it is asked to read, and what it then says. `text` is a file, `model` a directory with a
config.json."""

MISTAKES: dict[str, tuple[list[str], str]] = {
    "plan": (["--modle", "tiny"], "Nearest: --model."),
    "init": (["--sequnce_length", "8"], "Nearest: --sequence_length."),
    "launch": (["--on", "slurm", "--nnods", "8"], "Nearest: --nnodes."),
    "train": (["--optimizer.warmup_step", "8"], "Nearest: --optimizer.warmup_steps."),
    "verify": (["--train.step", "8"], "Nearest: --train.steps."),
    "prepare": (["--input", "text", "--output", "x", "--overwite"], "Nearest: --overwrite."),
    "data": (["inspect", "x", "--jsn"], "Nearest: --json."),
    "convert": (["exprot", "a", "b"], "Nearest: export."),
    "generate": (["x", "--promt", "a"], "Nearest: --prompt."),
    "evaluate": (["perplexiti", "x"], "Nearest: perplexity."),
    "checkpoint": (["lits", "x"], "Nearest: list."),
    "report": (["x", "--outptu", "y"], "Nearest: --output."),
    "compare": (["x", "--outptu", "y"], "Nearest: --output."),
    "timeline": (["x", "--jsn"], "Nearest: --json."),
    "explain": (["x", "--jsn"], "Nearest: --json."),
    "import-config": (["x", "--jsn"], "Nearest: --json."),
    "bubble": (["--pp", "2", "--microbatches", "2", "--schedule", "interleave"], "Nearest: interleaved."),
    "benchmark": (["stepp"], "Nearest: step."),
    "doctor": (["--quikc"], "Nearest: --quick."),
    "first-light": (["--shrot"], "Nearest: --short."),
    "completion": (["bsh"], "Nearest: bash."),
}
"""Command → words with one letter wrong, and what is proposed."""

OUTPUTS: dict[str, list[str]] = {
    "prepare": ["--input", "text", "--tokenizer", "byte", "--output", "OUT/x"],
    "convert": ["import", "model", "OUT/x"],
    "convert, out": ["export", "model", "OUT/x"],
    "convert, adapter": ["adapter-export", "model", "OUT/x"],
    "convert, loftq": ["loftq", "model", "OUT/x", "--rank", "4"],
    "init": ["--from", "tiny", "--output", "OUT/x"],
    "plan": ["--model", "tiny", "--gpus", "1", "--write", "OUT/x"],
    "launch": ["--on", "slurm", "--config", "quickstart", "--dp", "8", "--output", "OUT/x"],
    "report": ["model", "--output", "OUT/x"],
    "compare": ["model", "--output", "OUT/x"],
    "bubble": ["--pp", "2", "--microbatches", "2", "--schedule", "1f1b", "--timeline", "OUT/x.svg"],
    "checkpoint": ["consolidate", "model", "OUT/x"],
    "benchmark": ["bubble", "--output", "OUT/x"],
    "first-light": ["--output", "OUT/x"],
    "train": ["--config", "quickstart", "--data.train", "tokens_300", "--run.dir", "OUT/x"],
}
"""Command → words that let it write."""

PARTS = {"convert": "import", "data": "inspect", "evaluate": "perplexity", "checkpoint": "list", "benchmark": "step"}
"""Commands with subcommands → one of them."""

BLOCKED = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
for name in ("torch", "transformers", "matplotlib", "datasets"):
    sys.modules[name] = None
found = []
for words in json.load(sys.stdin):
    sys.argv, printed = ["megalite", *words], io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            runpy.run_module("megalite", run_name="__main__")
            status = None
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)
    found.append([status, printed.getvalue()])
json.dump(found, sys.stdout)
"""


def name_of(case: str) -> str:
    return case.partition(",")[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("place")
    (directory / "text").write_text("text")
    write_tokens(directory, 300, count=2000)
    for name in ("model", "taken"):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    """What the commands answer in a process that cannot import torch: exit status, and what is printed."""
    words_by_kind = {
        "help": {name: [name, "--help"] for name in COMMANDS},
        "help of a part": {name: [name, part, "--help"] for name, part in PARTS.items()},
        "missing": {case: [name_of(case), *words] for case, (words, _) in MISSING.items()},
        "mistakes": {name: [name, *words] for name, (words, _) in MISTAKES.items()},
    }
    cases = [(kind, case, words) for kind, each in words_by_kind.items() for case, words in each.items()]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        input=json.dumps([words for *_, words in cases]),
        capture_output=True,
        text=True,
        cwd=place,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "80", "HOME": str(place)},
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, dict[str, tuple[Any, str]]] = {kind: {} for kind in words_by_kind}
    for (kind, case, _), (status, printed) in zip(cases, json.loads(ran.stdout), strict=True):
        results[kind][case] = (status, printed)
    return results


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_path_is_answered_without_torch(case: str, answers):
    status, printed = answers["missing"][case]
    assert (status, printed.count("\n")) == (2, 1) and MISSING[case][1] in printed, printed


@pytest.mark.parametrize("name", MISTAKES)
def test_a_misspelt_word_gets_the_nearest_without_torch(name: str, answers):
    status, printed = answers["mistakes"][name]
    assert status == 2 and MISTAKES[name][1] in printed, printed


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_torch(name: str, answers):
    status, printed = answers["help"][name]
    assert status in (0, None) and "usage" in printed.lower(), printed


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_help_fits_the_terminal(name: str, columns: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        run(name, ["--help"], monkeypatch)
    longer = [line for line in capsys.readouterr().out.splitlines() if len(line) > columns]
    assert [line for line in longer if len(line.split()) > 2] == [], "only an option with its values cannot be broken"


def run(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", [f"megalite {name}", *words])
    return import_module(f"megalite.commands.{name.replace('-', '_')}").main()


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_that_cannot_be_written_is_named_before_any_work(
    case: str, place: Path, tmp_path: Path, monkeypatch, capsys
):
    """A read-only directory, and a file in place of a directory."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "locked").mkdir(mode=0o555)
    (tmp_path / "file").write_text("")
    for end, why in (("locked", "read-only for this user"), ("file", "is not a directory")):
        words = [word.replace("OUT", str(tmp_path / end)) for word in OUTPUTS[case]]
        with permissions_count(), pytest.raises(SystemExit) as ended:
            run(name_of(case), words, monkeypatch)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and str(tmp_path / end) in said and "Errno" not in said, said
        assert why in said or "is not writable" in said, said
        assert said.count("\n") == 1 and list((tmp_path / "locked").iterdir()) == []


FULL = {
    "prepare": OUTPUTS["prepare"],
    "init": ["--from", "quickstart", "--data", "tokens_300", "--gpus", "0", "--output", "OUT/x"],
    "plan": [
        *("--model", "tiny", "--vocab_size", "300", "--gpus", "1", "--gpu", "h100", "--plans", "1"),
        *("--sequence_length", "64", "--global_batch_size", "8", "--write", "OUT/x"),
    ],
    "bubble": OUTPUTS["bubble"],
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_named_and_nothing_is_left_on_it(name: str, place: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [word.replace("OUT", str(tmp_path)) for word in FULL[name]]
    with no_room(), pytest.raises(SystemExit) as ended:
        run(name, words, monkeypatch)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and str(tmp_path / "x") in said and "File too large" in said and "Errno" not in said, (
        said
    )
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_answers_has_json(answers):
    """The others train, or print a configuration, a script or a job."""
    printed = {name: answers["help"][name][1] + answers["help of a part"].get(name, (0, ""))[1] for name in COMMANDS}
    assert {name for name in COMMANDS if "--json" not in printed[name]} == {"train", "launch", "completion", "demo"}
