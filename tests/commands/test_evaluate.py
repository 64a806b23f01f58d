"""tools/evaluate.py: perplexity against transformers, and lm-evaluation-harness on our model against its own adapter
for transformers."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from megalite.commands import evaluate
from megalite.config.sections.data import DataConfig
from megalite.data.tokenizer import tokenizers as tokenizing
from megalite.evaluation import harness
from megalite.evaluation.harness import document_start
from megalite.evaluation.perplexity import windows
from megalite.generation.language_model import LanguageModel
from megalite.generation.sources import open_source, opening
from megalite.huggingface.convert import import_model
from tests.huggingface.hf_models import Case, write

LONGEST = 48
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXT = "Six quick cafés jump\n\n  over 日本 lazy dogs, and then they rest; " * 3
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " green", " a long and winding road to nowhere"], "answer": 0},
    {"question": "Grass is ", "choices": ["red", "green", "g"], "answer": 1},
    {
        "question": "A context that is much longer than what the model sees at once, whatever it says:",
        "choices": [" x", " yes", " no"],
        "answer": 2,
    },
]
TASK = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} and {{choices[2]}}: {{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["a", "~"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tokenizer(directory: Path, bos: bool) -> int:
    """Byte-level BPE without merges; with `bos`, as Llama's, which sets one before every text. Returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "<s>", "</s>"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    named = {"eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    PreTrainedTokenizerFast(tokenizer_object=raw, **named).save_pretrained(directory)
    return len(vocabulary)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A tiny random Llama as a Hugging Face directory, with a tokenizer that sets BOS before texts, and with one that
    has none."""
    results = {}
    for bos in (True, False):
        path = results[bos] = tmp_path_factory.mktemp("hf")
        size = write_tokenizer(path, bos)
        ids = {"vocab_size": size, "eos_token_id": size - 1, "bos_token_id": None, "pad_token_id": None}
        write(Case("Llama", SHAPE | ids | {"max_position_embeddings": LONGEST, "tie_word_embeddings": False}), path)
    return results


@pytest.fixture
def directory(models: dict[bool, Path]) -> Path:
    return models[True]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """run(*arguments) → the JSON on stdout."""

    def call(*arguments: str | Path) -> dict[str, Any]:
        capsys.readouterr()
        assert evaluate.main([*map(str, arguments), "--json"]) == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        return content

    return call


def loss_of(directory: Path, ids: list[int], length: int, stride: int) -> tuple[float, int]:
    """Sum of losses and their number by transformers, window by window; labels of what an earlier window has predicted
    are masked."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, predicted = 0.0, 0
    for end in [*range(length, len(ids) - 1, stride), len(ids) - 1]:
        begin = max(0, end - length)
        inputs, labels = torch.tensor(ids[begin:end]), torch.tensor(ids[begin + 1 : end + 1])
        labels[: predicted - begin] = -100
        with torch.no_grad():
            logits = model(input_ids=inputs[None]).logits[0]
        total += functional.cross_entropy(logits.double(), labels, reduction="sum").item()
        predicted = end
    return total, len(ids) - 1


@pytest.mark.parametrize(
    ("bos", "length", "stride", "batch_size"),
    [(True, 16, 5, 3), (False, 16, 16, 8), (True, LONGEST, 24, 2), (False, LONGEST, 7, 64)],
)
def test_perplexity_is_that_of_transformers(
    models, tmp_path: Path, run, bos: bool, length: int, stride: int, batch_size: int
) -> None:
    from transformers import AutoTokenizer

    directory = models[bos]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = {tmp_path / "long.txt": TEXT, tmp_path / "short.txt": "é\r\n"}
    for path, text in texts.items():
        path.write_bytes(text.encode())
    options = ["--sequence_length", length, "--stride", stride, "--batch_size", batch_size]
    content = run("perplexity", f"hf:{directory}", "--text", *texts, *options)
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    sums = [
        loss_of(directory, [begin, *tokenizer.encode(text, add_special_tokens=False)], length, stride)
        for text in texts.values()
    ]
    sums.append((sum(nats for nats, _ in sums), sum(count for _, count in sums)))
    sizes = [len(text.encode()) for text in texts.values()]
    for result, (nats, count), size in zip(content["texts"], sums, [*sizes, sum(sizes)], strict=True):
        assert (result["tokens"], result["bytes"]) == (count, size)
        assert result["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 30])
@pytest.mark.parametrize("stride", [1, 4, 6])
def test_windows_predict_every_token_once_with_the_promised_context(count: int, stride: int) -> None:
    length, predicted = 6, []
    for row in windows(range(count + 1), length, stride):
        assert len(row.tokens) - 1 <= length
        for target in row.tokens[len(row.tokens) - row.scored :]:
            assert target - row.tokens[0] >= min(target, length - stride + 1)
            predicted.append(target)
    assert predicted == list(range(1, count + 1))


def test_a_checkpoint_is_measured_as_what_it_was_imported_from(directory: Path, tmp_path: Path, run) -> None:
    """Its tokenizer came with it; by default a window is as long as the model allows, and its stride half of that."""
    (tmp_path / "text").write_text(TEXT)
    import_model(directory, tmp_path / "checkpoint")
    ours, theirs = (
        run("perplexity", name, "--text", tmp_path / "text") for name in (tmp_path / "checkpoint", f"hf:{directory}")
    )
    assert (ours["sequence_length"], ours["stride"]) == (LONGEST, LONGEST // 2)
    assert ours["texts"] == theirs["texts"]


def test_texts_follow_bos_only_where_the_model_may_know_it(models: dict[bool, Path], tmp_path: Path) -> None:
    """Documents that were prepared here end with EOS, and begin with nothing; who continues on them has begun with BOS
    elsewhere."""
    for bos, path in models.items():
        source, tokenizer = open_source(f"hf:{path}"), tokenizing.load(path)
        import_model(path, tmp_path / f"imported {bos}")
        starts = {
            None: False,
            f"hf:{path}": True,
            str(tmp_path / f"imported {bos}"): True,
            str(tmp_path / "gone"): False,
            "none": False,
        }
        assert document_start(source, tokenizer) == (tokenizer.bos if bos else tokenizer.eos)
        for start, elsewhere in starts.items():
            config = replace(
                source.config, data=DataConfig(train="prefix"), model=replace(source.config.model, init_from=start)
            )
            trained = replace(source, config=config)
            assert document_start(trained, tokenizer) == (tokenizer.bos if bos and elsewhere else tokenizer.eos), start
            assert opening(trained, tokenizer) == ([tokenizer.bos] if bos and elsewhere else []), start


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, with the questions that they ask."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, fields in TASKS.items():
        named = {"task": name, "dataset_kwargs": {"data_files": {"test": str(questions)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(TASK | named | fields))
    return folder


def on_transformers(directory: Path) -> Any:
    """The harness's own adapter for transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), dtype="float32", batch_size=2, device="cpu")


@pytest.mark.parametrize("bos", [True, False])
def test_requests_are_answered_as_by_the_harness_on_transformers(models: dict[bool, Path], bos: bool) -> None:
    """Contexts that are empty, end in spaces or are too long; answers of several tokens and of one; what greedy
    decoding would say."""
    from lm_eval.api.instance import Instance

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    theirs = on_transformers(models[bos])
    ours = harness.as_harness_model()(LanguageModel(f"hf:{models[bos]}"), tokenizing.load(models[bos]), 3)
    long = "never ending " * 9
    options = {"until": ["a", "~~"], "max_gen_toks": 12, "do_sample": False}
    requested = requests(
        "generate_until", ("The sky is", options), (long, options), ("x ", {"until": "b", "max_new_tokens": 5})
    )
    said = ours.generate_until(requested)
    assert said == theirs.generate_until(requested)
    assert max(map(len, said)) > 0
    letters = [(each, {"max_gen_toks": 1}) for each in string.ascii_letters]
    follows = ours.generate_until(requests("generate_until", *letters))
    own = next(
        (letter, token)
        for (letter, _), token in zip(letters, follows, strict=True)
        if token.isascii() and token.isprintable() and token
    )
    pairs = [
        ("", "begins"),
        ("The sky is ", "blue"),
        ("The sky is", " blue"),
        ("The sky is", "x"),
        ("The sky is", "y"),
        (long, " ends"),
        own,
    ]
    result = ours.loglikelihood(requests("loglikelihood", *pairs))
    for (value, greedy), (expected, greedy_there) in zip(
        result, theirs.loglikelihood(requests("loglikelihood", *pairs)), strict=True
    ):
        assert (value, greedy) == (pytest.approx(expected, rel=1e-5), greedy_there)
    assert result[-1][1], "the model's own answer is the greedy one"
    texts = requests("loglikelihood_rolling", (long,), ("short",), (long * 2,))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)


def test_tasks_give_the_figures_of_the_harness_on_transformers(
    directory: Path, tasks: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # it asks pip and the machine for seconds
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    content = run(
        "tasks",
        f"hf:{directory}",
        "--tasks",
        ",".join(TASKS),
        "--include_path",
        tasks,
        "--num_fewshot",
        1,
        "--limit",
        2,
    )
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    requested = {"tasks": list(TASKS), "num_fewshot": 1, "limit": 2, "task_manager": manager}
    expected = simple_evaluate(model=on_transformers(directory), **requested, log_samples=False)["results"]
    assert content["results"].keys() == expected.keys() == TASKS.keys()
    for task, figures in expected.items():
        numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
        assert numbers and {name: content["results"][task][name] for name in numbers} == pytest.approx(
            numbers, rel=1e-5
        )


def test_what_can_not_be_evaluated_ends_with_one_message(
    directory: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    without = partial(TaskManager, include_defaults=False)
    # thousands of files
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults=False, **options: without(**options))
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    text, model = ["--text", tmp_path / "text"], f"hf:{directory}"
    monkeypatch.setattr("sys.argv", ["tools/evaluate.py"])
    wrong: dict[str, list[Any]] = {
        "is not a checkpoint": ["perplexity", tmp_path / "nowhere", *text],
        "config.json could not be read": ["perplexity", f"hf:{tmp_path}", *text],
        "--text nowhere cannot be read": ["perplexity", model, "--text", "nowhere"],
        "parallel.tp = 3 does not divide": ["perplexity", model, *text, "--tp", 3],
        "which have no moving average. Remove --ema.": [
            "perplexity",
            model,
            *text,
            "--ema",
        ],
        "is empty": ["perplexity", model, "--text", tmp_path / "empty"],
        "is not valid UTF-8 (at byte 3)": ["perplexity", model, "--text", tmp_path / "latin"],
        "--sequence_length must be at most 48": ["perplexity", model, *text, "--sequence_length", 49],
        "--stride must be at most the sequence length (8), got 9": [
            "perplexity",
            model,
            *text,
            "--sequence_length",
            8,
            "--stride",
            9,
        ],
        "--batch_size: '0' is not a positive integer": ["perplexity", model, *text, "--batch_size", 0],
        "--tokenizer none.model does not exist": ["perplexity", model, *text, "--tokenizer", "none.model"],
        "--tasks nothing is not a task, group or tag of lm-evaluation-harness or": [
            "tasks",
            model,
            "--tasks",
            "nothing",
            "--include_path",
            tasks,
        ],
        "--include_path nowhere is not a directory": [
            "tasks",
            model,
            "--tasks",
            "tiny_choice",
            "--include_path",
            "nowhere",
        ],
        "Use megalite evaluate perplexity runs/x --text FILE, or megalite evaluate tasks runs/x --tasks NAME.": [
            "runs/x"
        ],
        "--num_fewshot must be non-negative, got -1": ["tasks", model, "--tasks", "tiny_choice", "--num_fewshot", "-1"],
    }
    for message, arguments in wrong.items():
        with pytest.raises(SystemExit) as ended:
            evaluate.main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert message in err and err.startswith("evaluate.py") and "Traceback" not in err
