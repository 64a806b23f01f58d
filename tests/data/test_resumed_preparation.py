"""A killed preparation continues where it was, with the same bytes in the end; any other begins anew, and two of one
PREFIX exclude each other. A kill is one: the preparation runs in a forked process that a signal ends."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megalite.data.chat.records import RecordReader
from megalite.data.indexed import DataError
from megalite.data.preparation import prepare as preparing
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.pool import WorkerLost
from megalite.data.preparation.prepare import PreparationSummary, prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.texts import Texts
from megalite.data.tokenizer import tokenizers as tokenizing
from tests.data.chats import SHORT

FORK = multiprocessing.get_context("fork")
TRAINED = {"tokenizer": "t.model", "train_tokenizer": 300}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path) -> None:
    """Inputs of many tasks, each of which is saved: texts, lines of which some are bad, a long text in pieces,
    conversations of which later ones have weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalite.data.preparation.journal.SAVE_S", 0)
    for name, size in (("TASK_BYTES", 300), ("PIECE_BYTES", 400), ("LONG_TEXT", 2000)):
        monkeypatch.setattr(f"megalite.data.preparation.sources.{name}", size)
    lines = [f"line {i} of {'a text with words ' * (i % 3)}" for i in range(100)]
    for i in range(5):
        Path(f"{i}.txt").write_text("\n".join(lines[i::7]))
    Path("long.txt").write_bytes(
        "\n".join(lines).encode() + b"\nno UTF-8: \xff\n" + b"\n".join(line.encode() for line in lines)
    )
    Path("a.jsonl").write_text(
        "\n".join("bad" if i == 3 else json.dumps({"text": line}) for i, line in enumerate(lines))
    )
    Path("b.jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": f"packed {line}"}) for line in lines).encode())
    )
    Path("chats.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [{**SHORT[0], "content": line}, {**SHORT[1], "weight": 1 - (i // 50) / 2}]})
            for i, line in enumerate(lines)
        )
    )


def run(
    prefix: str = "x", *, chat: bool = False, encoder: Texts | Chats | None = None, **options: Any
) -> PreparationSummary:
    names = options.pop("names", None) or (["chats.jsonl"] if chat else ["?.txt", "long.txt", "a.jsonl", "?.txt"])
    encoder = encoder or (Chats() if chat else Texts(skip_bad=1))
    text_key = None if chat else "text"
    sources = open_inputs(names, exclude=[], file_format="auto", text_key=text_key, split="train", skip_bad=True)
    return prepare(sources, Path(prefix), options.pop("tokenizer", "byte"), encoder, **options)


def killed(after: int, how: signal.Signals = signal.SIGKILL, **options: Any) -> None:
    """Run a preparation that is killed after the results of so many tasks."""

    def target() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test may have left a handler in this process
        tasks = []

        def progress(what: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            tasks.extend([1] if what == "tokenizing" else [])
            if len(tasks) == after:
                os.kill(os.getpid(), how)

        run(**options, progress=progress)

    process = FORK.Process(target=target)
    process.start()
    process.join(60)
    assert process.exitcode == -how


def files(prefix: str) -> dict[str, bytes]:
    return {path.name.removeprefix(prefix): path.read_bytes() for path in Path().glob(f"{prefix}.*")}


def left() -> list[str]:
    return sorted(path.name for path in Path().glob(".*"))


@pytest.mark.parametrize("options", [{}, {"chat": True}, TRAINED], ids=["texts", "conversations", "trained tokenizer"])
@pytest.mark.parametrize("after", [1, 9, 24])
def test_a_killed_preparation_continues(options, after):
    notes: list[str] = []
    whole = run("x", **options)
    expected = files("x")
    for path in [*Path().glob("x.*"), *Path().glob("t.model")]:
        path.unlink()
    killed(after, signal.SIGTERM if after == 9 else signal.SIGKILL, **options)
    assert not files("x"), "nothing is published"
    with Path(".x.preparing.bin").open("ab") as file:
        file.write(b"written after the journal was saved")
    seen: list[int] = []
    done = run(
        "x",
        **options,
        note=notes.append,
        progress=lambda what, at=0, *_: seen.append(at if what == "tokenizing" else 0),
    )
    assert files("x") == expected and left() == []
    assert done.resumed_bytes > 0 and min(seen) > done.resumed_bytes, (
        "no task is done twice, and no tokenizer is trained again"
    )
    assert asdict(done) == asdict(whole) | {"resumed_bytes": done.resumed_bytes}
    assert notes == [
        f"x: resuming an interrupted preparation at {done.resumed_bytes / 1e6:.1f} of {done.input_bytes / 1e6:.1f} MB"
    ]


def test_compressed_lines_continue_where_they_were():
    """Their offsets are none of the file: what was done is decompressed again, and not tokenized again."""
    whole: list[str] = []
    expected = (run("y", names=["b.jsonl.gz"], progress=lambda what, *_: whole.append(what)), files("y"))[1]
    killed(9, names=["b.jsonl.gz"])
    tasks: list[str] = []
    done = run("x", names=["b.jsonl.gz"], progress=lambda what, *_: tasks.append(what))
    assert (
        files("x") == expected and left() == [] and done.documents == 100 and 0 < done.resumed_bytes <= done.input_bytes
    )
    assert 0 < len(tasks) <= len(whole) - 8


def test_it_can_be_killed_twice():
    expected = (run("y"), files("y"))[1]
    killed(8)
    killed(7)
    assert run("x").resumed_bytes > 0 and files("x") == expected


def newer_input() -> dict[str, Any]:
    os.utime("2.txt", ns=(1, 1))
    return {}


def longer_input() -> dict[str, Any]:
    Path("2.txt").write_text(Path("2.txt").read_text() + "!")
    return {}


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "an input has changed": newer_input,
    "an input is longer": longer_input,
    "another option": lambda: {"encoder": Texts(skip_bad=2)},
    "conversations": lambda: {"chat": True, "encoder": Chats(reader=RecordReader(drop_other_parts=True))},
    "another tokenizer": lambda: TRAINED,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_preparation_begins_anew_and_says_so(name):
    killed(9)
    options = OTHERS[name]()
    expected = (run("y", **options), files("y"))[1]
    notes: list[str] = []
    assert run("x", **options, note=notes.append, overwrite=True).resumed_bytes == 0
    assert notes == ["x: discarding an interrupted preparation with different inputs or options and starting over"]
    mine = files("x")
    assert {end: mine[end] for end in (".bin", ".idx")} == {
        end: expected[end] for end in (".bin", ".idx")
    } and left() == []


def test_a_trained_tokenizer_of_another_preparation_is_removed():
    killed(5, **TRAINED)
    assert ".t.model.preparing.model" in left()
    run("x")
    assert left() == []


def test_temporary_files_that_were_cut_are_not_used():
    expected = (run("y"), files("y"))[1]
    killed(9)
    Path(".x.preparing.bin").write_bytes(b"")
    notes: list[str] = []
    assert run("x", note=notes.append).resumed_bytes == 0
    assert files("x") == expected and left() == []
    assert "could not resume the interrupted preparation (.x.preparing.bin has fewer than" in notes[0] and notes[
        0
    ].endswith("starting over")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, DataError])
def test_after_an_error_or_ctrl_c_nothing_is_left(error):
    def progress(what: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        raise error

    before = sorted(path.name for path in Path().iterdir())
    with pytest.raises(error):
        run("x", progress=progress)
    assert sorted(path.name for path in Path().iterdir()) == before


def test_a_lost_worker_leaves_what_the_next_start_continues(monkeypatch):
    expected = (run("y"), files("y"))[1]
    encoded = preparing.encoded

    def dying(*arguments: Any):
        for number, part in enumerate(encoded(*arguments)):
            if number == 6:
                raise WorkerLost("a worker was killed")
            yield part

    monkeypatch.setattr("megalite.data.preparation.journal.SAVE_S", 1e9)
    with monkeypatch.context() as patched, pytest.raises(WorkerLost):
        patched.setattr(preparing, "encoded", dying)
        run("x")
    assert run("x").resumed_bytes > 0 and files("x") == expected and left() == []


def test_two_preparations_of_one_prefix_exclude_each_other(tmp_path):
    """The second is refused by the first one's process; after a kill the lock is free."""

    def hold() -> None:
        def progress(what: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            Path("holds").touch()
            time.sleep(600)

        run("x", progress=progress)

    process = FORK.Process(target=hold)
    process.start()
    deadline = time.monotonic() + 240
    while not Path("holds").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(
        DataError, match=f"--output x is being written by process {process.pid} on .*choose another PREFIX"
    ):
        run("x")
    run("y")
    process.kill()
    process.join()
    run("x")
    assert files("x")[".bin"] == files("y")[".bin"] and left() == []


def test_a_file_system_without_locks_prepares(monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert run("x").documents > 0 and left() == []


def test_the_tokenizer_files_belong_to_what_is_continued(tmp_path):
    """A model that was trained again under the same name gives other tokens: the old ones are not continued."""
    texts = Path("long.txt").read_text(errors="replace")
    tokenizing.train_sentencepiece([texts], 300, Path("own.model"))
    killed(9, tokenizer="own.model")
    tokenizing.train_sentencepiece([texts], 310, Path("own.model"))
    assert run("x", tokenizer="own.model").resumed_bytes == 0


@pytest.mark.parametrize("options", [{}, {"chat": True}, TRAINED], ids=["texts", "conversations", "trained tokenizer"])
def test_the_same_preparation_again_does_nothing(options):
    def stamps() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in Path().iterdir()}

    def progress(*arguments: Any) -> None:
        raise AssertionError("nothing is left to do")

    first = run("x", **options)
    before = stamps()
    again = run("x", **options, progress=progress)
    assert asdict(again) == asdict(first) | {"existing": True} and stamps() == before and left() == []


REPLACING: dict[str, Callable[[], dict[str, Any]]] = {
    **OTHERS,
    "the file has gone": lambda: Path("x.bin").unlink() or {},
}


@pytest.mark.parametrize("name", REPLACING)
def test_another_preparation_replaces_nothing_unasked(name):
    first = run("x")
    options = REPLACING[name]()
    before = files("x")
    size = f"{first.documents} documents, {first.tokens:,} tokens"
    with pytest.raises(
        DataError,
        match=rf"--output x already contains data .*\({size}, made 20.* with the tokenizer byte\).*another --output",
    ):
        run("x", **options)
    assert files("x") == before and left() == []
    replaced = run("x", **options, overwrite=True)
    assert not replaced.existing and run("x", **options).existing


def test_a_tokenizer_is_not_trained_over_that_of_other_data():
    run("x", **TRAINED)
    with pytest.raises(
        DataError,
        match=r"--train_tokenizer would overwrite t\.model \(made .*Choose another --tokenizer or --output, or",
    ):
        run("y", **TRAINED)
    Path("t.model").unlink()
    with pytest.raises(DataError, match=r"with the tokenizer t\.model, which has since been changed or removed\)"):
        run("x", **TRAINED)
    assert not run("x", **TRAINED, overwrite=True).existing and run("x", **TRAINED).existing
