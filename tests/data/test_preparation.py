"""tools/prepare_data.py from input to token file: content, order, independence of workers, atomicity, messages."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.commands.prepare import main
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer import tokenizers as tokenizing
from megalite.families import hub

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"
WORDS = ["alpha", "beta", "def f(x):\n    return x", "grüße", "日本語", "\tgamma\r\n"]
TEXTS = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 40 + i % 7)) + f"\n{i}" for i in range(60)]

Run = Callable[..., dict]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Run:
    """run(*arguments) → the JSON result; in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments, "--workers", "1", "--json"])
        main()
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def refusal(run, capsys) -> Callable[..., str]:
    """refusal(*arguments) → the one message of a run that must end with status 2, print no result and leave every file
    as it was."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}

    def call(*arguments: str) -> str:
        before = files()
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        out, err = capsys.readouterr()
        (message,) = [
            line for line in err.splitlines() if not line.startswith(("tokenizing: ", "reading for the tokenizer: "))
        ]
        assert (caught.value.code, out, files()) == (2, "", before)
        assert message.startswith("prepare_data.py: ")
        return message

    return call


def texts_of(prefix: str | Path) -> list[str]:
    """The documents of a token file, decoded by the tokenizer that PREFIX.json names; each must end in EOS and hold no
    other."""
    tokens, tokenizer = IndexedTokens(prefix), tokenizing.load_for(prefix)
    assert (tokens.vocab_size, tokens.eos) == (tokenizer.vocab_size, tokenizer.eos)
    ends = tokens.sizes.cumsum().tolist()
    documents = [
        tokens.tokens[end - size : end].tolist() for size, end in zip(tokens.sizes.tolist(), ends, strict=True)
    ]
    assert all(document.index(tokens.eos) == len(document) - 1 for document in documents)
    return [tokenizer.decode(document) for document in documents]


def write_files(folder: Path, texts: list[str], name: str = "{:03}.txt") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / name.format(i)).write_bytes(text.encode())


def write_parquet(path: Path, texts: list[str | None], key: str = "text", dictionary: bool = False) -> None:
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.array(texts)
    columns = {"id": list(range(len(texts))), key: column.dictionary_encode() if dictionary else column}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)


def make_txt(folder: Path) -> list[str]:
    write_files(folder / "t", TEXTS)
    return ["t/*.txt"]


def make_jsonl(folder: Path) -> list[str]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS[:30]) + "\n")
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps({"body": 0, "text": text}, ensure_ascii=False) for text in TEXTS[30:])
    )
    return ["a.jsonl", "b.jsonl"]


def make_parquet(folder: Path) -> list[str]:
    write_parquet(folder / "a.parquet", list(TEXTS[:30]))
    write_parquet(folder / "b.parquet", list(TEXTS[30:]), dictionary=True)
    return ["a.parquet", "b.parquet"]


def make_mixed(folder: Path) -> list[str]:
    write_files(folder / "t", TEXTS[:10])
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[10:20]))
    write_parquet(folder / "b.parquet", list(TEXTS[20:50]))
    write_files(folder / "u" / "deep", TEXTS[50:])
    return ["t/*.txt", "a.jsonl", "b.parquet", "u/**/*.txt"]


@pytest.mark.parametrize("make", [make_txt, make_jsonl, make_parquet, make_mixed])
def test_every_format_in_order(run, tmp_path, make):
    result = run("--input", *make(tmp_path), "--tokenizer", "byte", "--output", "out/x")
    assert texts_of("out/x") == TEXTS
    assert (result["documents"], result["tokens"]) == (60, sum(len(text.encode()) + 1 for text in TEXTS))
    assert (result["vocab_size"], result["eos"], result["dtype"], result["tokenizer"]) == (257, 256, "uint16", "byte")
    assert sorted(path.name for path in Path("out").iterdir()) == ["x.bin", "x.idx", "x.json"]


def test_a_dataset_of_the_hub_without_a_network_is_one_message(refusal, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")  # as they were, afterwards
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "online", lambda: False)

    def load_dataset(*words: object, **options: object) -> None:
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1", (
            "nothing is tried again and again"
        )
        raise ConnectionError("Couldn't reach org/name.")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    message = refusal("--input", "hf:org/name:plain", "--tokenizer", "byte", "--output", "z")
    assert (
        "Couldn't reach org/name. The Hugging Face Hub is not reachable. Run "
        "`hf download --repo-type dataset org/name --local-dir DIR`" in message
    )


def test_hugging_face_dataset_by_name(run, refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    write_parquet(tmp_path / "corpus" / "train.parquet", list(TEXTS), key="body")
    write_parquet(tmp_path / "corpus" / "test.parquet", ["other"], key="body")
    run("--input", "hf:corpus", "--text_key", "body", "--tokenizer", "byte", "--output", "x")
    assert texts_of("x") == TEXTS
    run("--input", "hf:corpus", "--split", "test", "--text_key", "body", "--tokenizer", "byte", "--output", "y")
    assert texts_of("y") == ["other"]
    for arguments, message in (
        (["--split", "dev"], "Could not load split dev of --input hf:corpus"),
        (["--text_key", "text"], "keys: id, body"),
    ):
        assert message in refusal("--input", "hf:corpus", *arguments, "--tokenizer", "byte", "--output", "z")


def test_trained_tokenizer_lies_beside_the_data(run, tmp_path):
    write_files(tmp_path / "t", TEXTS)
    result = run("--input", "t/*.txt", "--train_tokenizer", "330", "--output", "out/x")
    assert sorted(path.name for path in Path("out").iterdir()) == ["x.bin", "x.idx", "x.json", "x.model"]
    assert (result["vocab_size"], result["tokenizer"]) == (330, "x.model")
    assert json.loads(Path("out/x.json").read_text())["tokenizer_files"] == ["x.model"]
    assert texts_of("out/x") == TEXTS
    Path("out").rename("moved")
    assert texts_of("moved/x") == TEXTS, "the directory can be moved"
    run("--input", "t/*.txt", "--tokenizer", "moved/x.model", "--output", "again/x")
    assert texts_of("again/x") == TEXTS
    assert Path("again/x.bin").read_bytes() == Path("moved/x.bin").read_bytes()


def test_trained_tokenizer_by_name(run, tmp_path):
    write_files(tmp_path / "t", TEXTS)
    run("--input", "t/*.txt", "--train_tokenizer", "330", "--tokenizer", "models/m.model", "--output", "x")
    assert Path("models/m.model").is_file()
    assert texts_of("x") == TEXTS


def test_workers_do_not_show(tmp_path):
    """Enough input for many tasks, so that 3 workers finish them out of order."""
    write_files(tmp_path, [text * (800 if i % 9 == 0 else 80) for i, text in enumerate(TEXTS)], "{:03}.py")
    (tmp_path / "z.jsonl").write_text("".join(json.dumps({"text": text * 9}) + "\n" for text in TEXTS))
    for workers in (1, 3):
        output = ["--output", str(tmp_path / f"w{workers}" / "x"), "--workers", str(workers), "--json"]
        command = [
            sys.executable,
            TOOL,
            "--input",
            f"{tmp_path}/*.py",
            f"{tmp_path}/z.jsonl",
            "--train_tokenizer",
            "330",
            *output,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["documents"] == 120
        assert done.stdout.count("\n") == 1, "the result alone is on stdout"
    for end in ("bin", "idx", "json", "model"):
        assert (tmp_path / "w1" / f"x.{end}").read_bytes() == (tmp_path / "w3" / f"x.{end}").read_bytes()


def test_training_reads_its_share_alone(tmp_path, monkeypatch):
    """Of 40 tasks every fourth trains the tokenizer: a bad line between them is met only when tokenizing."""
    monkeypatch.setattr("megalite.data.preparation.sources.TASK_BYTES", 10_000)
    monkeypatch.setattr("megalite.data.preparation.prepare.TRAINING_BYTES", 100_000)
    lines = [json.dumps({"text": f"{i} " + TEXTS[i % 60] * 5}) for i in range(200)]
    lines[13] = "{}"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    stages = []
    sources = open_inputs([str(tmp_path / "a.jsonl")], exclude=[], file_format="auto", text_key="text", split="train")
    with pytest.raises(DataError, match=r"a.jsonl line 14 has no key text"):
        prepare(
            sources,
            tmp_path / "x",
            str(tmp_path / "x.model"),
            train_tokenizer=330,
            progress=lambda what, *_: stages.append(what),
        )
    assert stages[-1] == "tokenizing"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_odd_text(run, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"line\r\nline\n\n")
    (tmp_path / "d.jsonl").write_text(
        '{"text": "lone \\ud800 surrogate"}\n{"text": ""}\n{"text": "pair \\ud83c\\udf89"}\n'
    )
    result = run("--input", "*.txt", "d.jsonl", "--tokenizer", "byte", "--output", "x")
    assert texts_of("x") == ["caf\ufffd au lait", "line\r\nline\n\n", "lone \ufffd surrogate", "pair 🎉"]
    assert (result["replaced_documents"], result["empty_documents"]) == (2, 2)


def test_null_text_is_empty(run, tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", None, "two"])
    assert run("--input", "a.parquet", "--tokenizer", "byte", "--output", "x")["empty_documents"] == 1
    assert texts_of("x") == ["one", "two"]


def test_exclude_format_and_repeats(run, tmp_path):
    write_files(tmp_path / "t" / "tests", ["left out"])
    write_files(tmp_path / "t", ["one", "two"], "{}.weird")
    run(
        "--input",
        "t/0.weird",
        "t/**/*.*",
        "--exclude",
        "*/tests/*",
        "--format",
        "text",
        "--tokenizer",
        "byte",
        "--output",
        "x",
    )
    assert texts_of("x") == ["one", "two"], "a file that is named twice is taken once"


BAD = {
    "missing file": (["--input", "none.txt", "--tokenizer", "byte"], "--input none.txt does not exist"),
    "empty glob": (["--input", "*.none", "--tokenizer", "byte"], "No files match --input *.none"),
    "directory": (["--input", "folder", "--tokenizer", "byte"], "--input folder is a directory"),
    "unknown suffix": (["--input", "a.pdf", "--tokenizer", "byte"], "from its suffix '.pdf'"),
    "all excluded": (["--input", "ok.txt", "--exclude", "*", "--tokenizer", "byte"], "excludes all files"),
    "only empty text": (["--input", "empty.txt", "--tokenizer", "byte"], "the input contains no text"),
    "no text key": (
        ["--input", "ok.txt", "key.jsonl", "--tokenizer", "byte"],
        "key.jsonl line 2 has no key text (--text_key). Available keys: body",
    ),
    "text is a number": (
        ["--input", "number.jsonl", "--tokenizer", "byte"],
        "line 1: the value of --text_key text must be a string, got int",
    ),
    "not an object": (["--input", "list.jsonl", "--tokenizer", "byte"], "list.jsonl line 1 is a list, not an object"),
    "not JSON": (["--input", "broken.jsonl", "--tokenizer", "byte"], "broken.jsonl line 2 is not valid JSON"),
    "not parquet": (["--input", "bad.parquet", "--tokenizer", "byte"], "bad.parquet as parquet"),
    "no column": (
        ["--input", "a.parquet", "--text_key", "body", "--tokenizer", "byte"],
        "--text_key body not found in a.parquet. Available keys: id, text",
    ),
    "number column": (
        ["--input", "a.parquet", "--text_key", "id", "--tokenizer", "byte"],
        "of type int64 in a.parquet",
    ),
    "no tokenizer": (["--input", "ok.txt"], "--tokenizer is required"),
    "missing tokenizer": (["--input", "ok.txt", "--tokenizer", "x.model"], "--tokenizer x.model does not exist"),
    "text as a tokenizer": (["--input", "ok.txt", "--tokenizer", "ok.txt"], "ok.txt is not a sentencepiece model"),
    "train to no model": (
        ["--input", "ok.txt", "--tokenizer", "byte", "--train_tokenizer", "300"],
        "--tokenizer must end in .model",
    ),
    "vocabulary too large": (
        ["--input", "ok.txt", "--train_tokenizer", "90000"],
        "Failed to train a tokenizer with --train_tokenizer 90000",
    ),
    "vocabulary is text": (["--input", "ok.txt", "--train_tokenizer", "many"], "invalid int value: 'many'"),
    "chat options for text": (
        ["--input", "ok.txt", "--tokenizer", "byte", "--loss_on", "last", "--too_long", "truncate"],
        "--loss_on can only be used with --chat. Add --chat",
    ),
    "unknown option": (["--input", "ok.txt", "--tokenizer", "byte", "--fast"], "--fast"),
    "bad line after training": (
        ["--input", "long.txt", "key.jsonl", "--train_tokenizer", "300"],
        "key.jsonl line 2 has no key text (--text_key)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(refusal, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(
        "megalite.data.preparation.prepare.TRAINING_BYTES", 100_000
    )  # so that training skips key.jsonl and preparation meets it
    for name, text in {
        "ok.txt": "fine",
        "empty.txt": "",
        "a.pdf": "%PDF",
        "key.jsonl": '{"text": "a"}\n{"body": "b"}\n',
        "number.jsonl": '{"text": 1}\n',
        "list.jsonl": "[1]\n",
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "bad.parquet": "no",
        "long.txt": "\n".join(TEXTS) * 12,
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    write_parquet(tmp_path / "a.parquet", ["one"])
    assert message in refusal(*arguments, "--output", "x")


def test_bad_output(refusal, tmp_path):
    (tmp_path / "ok.txt").write_text("fine")
    (tmp_path / "folder").mkdir()
    assert "--output folder is a directory" in refusal("--input", "ok.txt", "--tokenizer", "byte", "--output", "folder")
    assert "ok.txt" in refusal("--input", "ok.txt", "--tokenizer", "byte", "--output", "ok.txt/x")


def test_an_older_file_survives_a_failed_run(run, refusal, tmp_path):
    (tmp_path / "ok.txt").write_text("first")
    (tmp_path / "bad.jsonl").write_text("{")
    run("--input", "ok.txt", "--tokenizer", "byte", "--output", "x")
    refusal("--input", "ok.txt", "bad.jsonl", "--tokenizer", "byte", "--output", "x", "--overwrite")
    assert texts_of("x") == ["first"]
    (tmp_path / "ok.txt").write_text("second")
    run("--input", "ok.txt", "--tokenizer", "byte", "--output", "x", "--overwrite")
    assert texts_of("x") == ["second"]


def test_preparation_imports_no_torch(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    code = (
        "import sys, runpy; sys.argv = ['x', '--input', 'a.txt', '--tokenizer', 'byte', '--output', 'x', '--workers', "
        "'1']\n"
        f"try:\n    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "finally:\n    assert not {'torch', 'transformers', 'datasets', 'sentencepiece', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 document, 2 tokens (uint16), vocabulary 257" in done.stdout
