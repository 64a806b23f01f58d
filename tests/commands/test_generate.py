"""tools/generate.py: a model that knows one sentence by heart, trained on tensor-parallel ranks, says it on any."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.checkpoint.manifest import encode
from megalite.commands.generate import main
from megalite.data.preparation.writer import IndexedWriter
from megalite.data.tokenizer.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.generation.text import reply_to
from tests.commands.jobs import train_and_save
from tests.huggingface.hf_models import CASES, write
from tests.support.pool import RankPool

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate.py"
SENTENCE = "Every café at six: quick brown foxes jump over lazy dogs."
LONGEST = 40
GREEDY = ("--temperature", "0")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that has read nothing but the sentence, each time to its end."""
    directory = tmp_path_factory.mktemp("memorised")
    document = [*ByteTokenizer().encode(SENTENCE), ByteTokenizer().eos]
    with IndexedWriter(directory / "sentence", 257) as writer:
        writer.add(np.array(document * 40), [len(document)] * 40)
        writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte"})
    model = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 257,
    }
    config = {
        "run": {"dir": str(directory), "name": "run"},
        "model": {**model, "max_position_embeddings": LONGEST, "tie_word_embeddings": True},
        "parallel": {"tp": 2, "dp": 1, "sequence_parallel": True},
        "data": {"train": str(directory / "sentence"), "sequence_length": LONGEST},
        "train": {"steps": 120, "global_batch_size": 8, "micro_batch_size": 8},
        "optimizer": {"lr": 2e-2, "warmup_steps": 5, "weight_decay": 0.0},
    }
    saved, loss = ranks.run(2, train_and_save, config)[0]
    assert loss < 0.3, "the model has not learned the sentence"
    return Path(saved)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageModel:
    return LanguageModel(checkpoint)


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """generate(*arguments) → what a run in this process prints."""

    def call(*arguments: str | Path) -> str:
        assert main(list(map(str, arguments))) == 0
        return capfd.readouterr().out

    return call


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments) → the one message of a run that must end with status 2 and print nothing else."""

    def call(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, arguments)))
        out, err = capfd.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
        return err

    return call


def test_the_sentence_continues_greedily_to_its_end(checkpoint: Path, generate: Callable[..., str]) -> None:
    """From the run's directory, past the longest sequence that the model takes at once, until EOS; and up to a stop
    text."""
    run = checkpoint.parents[1]
    result = json.loads(generate(run, "--prompt", "Every caf", *GREEDY, "--json"))
    assert result["continuation"] == SENTENCE.removeprefix("Every caf")
    assert result["tokens"][-1] == 256
    assert (result["ended_document"], result["stopped"], result["step"]) == (True, False, 120)
    assert generate(run, "--prompt", "Every caf", *GREEDY, "--stop", "nothing", "--stop", "quick b") == "é at six: \n"


def test_the_continuation_alone_is_printed_and_is_as_long_as_asked(
    checkpoint: Path, generate: Callable[..., str]
) -> None:
    arguments = (checkpoint, "--prompt", "Every c", *GREEDY, "--tokens", "5", "--tokenizer", "byte")
    assert generate(*arguments) == generate(*arguments, "--stream") == "afé \n"  # é is two bytes


def test_ranks_that_the_tool_starts_say_what_one_process_says(
    checkpoint: Path, tmp_path: Path, generate: Callable[..., str]
) -> None:
    """Two prompts from a file, side by side and in chunks, on two stages that are processes of their own."""
    (tmp_path / "prompts.jsonl").write_text('"Every caf"\n\n{"prompt": "quick brown f", "other": 1}\n')
    words = [checkpoint, "--prompts", tmp_path / "prompts.jsonl", "--tokens", "30", "--temperature", "1.5", "--json"]
    chunks = ["--prefill_chunk_size", "4"]
    content, expected = json.loads(generate(*words, "--pp", "2", *chunks)), json.loads(generate(*words))
    assert [each["prompt"] for each in content] == ["Every caf", "quick brown f"]
    assert [each["tokens"] for each in content] == [each["tokens"] for each in expected]
    assert [each["continuation"] for each in content] == [each["continuation"] for each in expected]


def test_several_prompts_are_printed_with_their_continuations(checkpoint: Path, generate: Callable[..., str]) -> None:
    printed = generate(checkpoint, "--prompt", "Every c", "--prompt", "quick br", *GREEDY, "--tokens", "5")
    assert printed == "--- 'Every c'\nafé \n--- 'quick br'\nown f\n"


def test_what_has_no_encoding_is_replaced_in_prompts(
    checkpoint: Path, tmp_path: Path, generate: Callable[..., str]
) -> None:
    """Lone surrogates, of JSON and of a command line that is not UTF-8; and the byte-order mark of a file."""
    lines = ['"a \\ud800"', '{"prompt": "b \\uDC80 \\ud83c\\udf89"}']
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    words = [*GREEDY, "--tokens", "2", "--json"]
    content = json.loads(generate(checkpoint, "--prompts", tmp_path / "prompts.jsonl", *words))
    assert [each["prompt"] for each in content] == ["a \ufffd", "b \ufffd 🎉"]
    plain = json.loads(generate(checkpoint, "--prompt", "a \ufffd", "--prompt", "b \ufffd 🎉", *words))
    assert [each["tokens"] for each in content] == [each["tokens"] for each in plain]
    assert json.loads(generate(checkpoint, "--prompt", "c \udcff", *words))["prompt"] == "c \ufffd"


def test_a_long_prompt_counts_only_in_its_last_window(model: LanguageModel) -> None:
    """The window is all that the model has positions for; inside it every token counts. Beyond it half of the window
    goes on."""
    tokens = ByteTokenizer().encode(3 * SENTENCE)
    sampling = Sampling(temperature=0.0)
    assert next(model.continuations([tokens], 1, sampling)) == next(
        model.continuations([tokens[-LONGEST:]], 1, sampling)
    )
    second = list(model.continuation(tokens, 2, sampling))
    assert second[1] == next(model.continuation([*tokens, second[0]][-LONGEST // 2 :], 1, sampling))
    seen = [model.logits([tokens[-count:]])[count - 1, 0] for count in (LONGEST - 1, LONGEST)]
    assert not seen[0].equal(seen[1])
    with pytest.raises(ValueError, match="rows must have 1 to 40 tokens"):
        model.logits([tokens])


def test_draws_follow_their_seed_and_their_limits(model: LanguageModel) -> None:
    prompt = ByteTokenizer().encode("Eve")

    def generate(temperature: float, top_k: int, seed: int, vocab_size: int | None = None) -> list[int]:
        return list(model.continuation(prompt, 24, Sampling(temperature, top_k, seed=seed), vocab_size=vocab_size))

    assert generate(9.0, 0, 1) == generate(9.0, 0, 1)
    assert generate(9.0, 0, 1) != generate(9.0, 0, 2)
    assert generate(9.0, 1, 1) == generate(0.0, 0, 2) == generate(1e-30, 0, 3)
    assert len(set(generate(1e6, 3, 1))) > 3  # three other ones at each step
    assert max(generate(1e6, 0, 1)) >= 100 > max(generate(1e6, 0, 1, vocab_size=100))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model with a tokenizer of bytes, a chat template, and a BOS before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    raw = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    case = CASES["llama, one key-value head"]
    directory = write(
        case._replace(fields=case.fields | {"vocab_size": 258}), tmp_path_factory.mktemp("assistant") / "hf"
    )
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast_tokenizer.save_pretrained(directory)
    return directory


def test_a_conversation_goes_through_the_chat_template(
    assistant: Path, generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns and a system message: what the model is given, and how its answers come back."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\n\nAnd now?\n"))
    printed = generate(f"hf:{assistant}", "--chat", "--system", "S", "--tokens", "4", *GREEDY)
    tokenizer, model = HuggingFaceTokenizer(assistant), LanguageModel(f"hf:{assistant}")
    theirs = AutoTokenizer.from_pretrained(assistant)
    said, texts = "<system>S", []
    for turn in ("Hi!", "And now?"):
        said += f"<user>{turn}<assistant>"
        tokens = theirs.encode(said, add_special_tokens=False)
        (reply,) = reply_to(model, tokenizer, [tokens], 4, Sampling(temperature=0.0), ends=[2, 257])
        texts.append(reply.text)
        said += f"{reply.text}</s>"
    assert printed == "".join(f"{text}\n" for text in texts)


def test_an_answer_ends_where_the_template_ends_a_turn(
    assistant: Path, tmp_path: Path, generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an added token, here one that the model says."""
    from transformers import AutoTokenizer

    tokenizer, model = HuggingFaceTokenizer(assistant), LanguageModel(f"hf:{assistant}")
    tokens = tokenizer.encode("<user>Hi!<assistant>")
    (reply,) = reply_to(model, tokenizer, [tokens], 40, Sampling(temperature=0.0))
    length = next(i for i, token in enumerate(reply.tokens) if token not in tokens)
    theirs = AutoTokenizer.from_pretrained(assistant)
    end = theirs.convert_ids_to_tokens(reply.tokens[length])
    theirs.add_tokens([end])
    theirs.chat_template = TEMPLATE.replace("eos_token", f"'{end}'")
    changed = shutil.copytree(assistant, tmp_path / "changed")
    theirs.save_pretrained(changed)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\n"))
    assert (
        generate(f"hf:{changed}", "--chat", "--tokens", "40", *GREEDY) == f"{tokenizer.decode(reply.tokens[:length])}\n"
    )


def test_white_space_after_a_turn_ends_no_answer(
    checkpoint: Path, tmp_path: Path, generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = (
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content + ' ' }}{% endgeneration %}{% else %}"
    )
    template = f"{{% for message in messages %}}{says}{{{{ message.content }}}}{{% endif %}}{{% endfor %}}"
    (tmp_path / "spaced.jinja").write_text(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Every caf\n"))
    assert (
        generate(checkpoint, "--chat", "--chat_template", tmp_path / "spaced.jinja", *GREEDY)
        == "é at six: quick brown foxes jump over lazy dogs.\n"
    )


def test_bytes_that_are_no_text_are_read_as_such(
    checkpoint: Path, generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for typed in (b"a\xffb\nc\n", "a\ufffdb\nc\n".encode()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        answers.append(generate(checkpoint, "--chat", "--tokens", "2", *GREEDY))
    assert answers[0] == answers[1] != ""


def test_a_conversation_forgets_its_oldest_turns_when_the_context_is_full(
    checkpoint: Path, tmp_path: Path, generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template of a file; 40 positions hold one of the turns and its answer, and the system message, but not
    two."""
    (tmp_path / "short.jinja").write_text("{% for message in messages %}{{ message.content }}|{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a line of eighteen\nEvery café at\n"))
    options = ("--chat", "--chat_template", tmp_path / "short.jinja", "--system", "S", "--tokens", "6", *GREEDY)
    _, second = generate(checkpoint, *options).splitlines()
    alone = json.loads(generate(checkpoint, "--prompt", "S|Every café at|", "--tokens", "6", "--json", *GREEDY))
    assert second == alone["continuation"]


def test_a_prompt_of_a_hugging_face_model_begins_as_its_tokenizer_begins_texts(
    assistant: Path, generate: Callable[..., str]
) -> None:
    content = json.loads(generate(f"hf:{assistant}", "--prompt", "Hi", "--tokens", "3", "--json", *GREEDY))
    tokenizer = HuggingFaceTokenizer(assistant)
    prompt = [256, *tokenizer.encode("Hi")]
    assert content["tokens"] == list(
        LanguageModel(f"hf:{assistant}").continuation(prompt, 3, Sampling(temperature=0.0))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be a non-negative number, got -1.0"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature must be a non-negative number, got nan"),
        (["--prompt", "x", "--top_k", "-3"], "--top_k must be non-negative, got -3"),
        (["--prompt", "x", "--top_p", "0"], "--top_p must be in (0, 1], got 0.0"),
        (["--prompt", "x", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--prompt", "x", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "x", "--tp", "0"], "--tp must be at least 1, got 0"),
        (["--prompt", "x", "--prefill_chunk_size", "0"], "--prefill_chunk_size must be at least 1, got 0"),
        (["--prompt", "x", "--system", "s"], "--system requires --chat"),
        (["--prompt", "x", "--chat_template", "s"], "--chat_template requires --chat"),
        (["--chat", "--json"], "--json is not supported with --chat"),
        (["--chat", "--prompt", "x"], "one is required, got 2 of them"),
        ([], "one is required, got 0 of them"),
    ],
)
def test_wrong_options_end_with_one_message(arguments: list[str], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("nowhere", *arguments)


def test_what_can_not_be_loaded_ends_with_one_message(
    checkpoint: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "manifest.json").write_text(encode({}, {}))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "wrong.jsonl").write_text('{"text": "x"}\n')
    wrong: dict[str, list[str | Path]] = {
        "is not a checkpoint: the directory does not exist": [tmp_path / "nowhere", "--prompt", "x"],
        "does not contain averaged weights because train.ema_decay was not set. Remove --ema.": [
            checkpoint,
            "--prompt",
            "x",
            "--ema",
        ],
        "contains no configuration": [tmp_path, "--prompt", "x"],
        "config.json could not be read": [f"hf:{tmp_path}", "--prompt", "x"],
        "--tokenizer none.model does not exist": [checkpoint, "--prompt", "x", "--tokenizer", "none.model"],
        "parallel.tp = 3 does not divide model.num_attention_heads = 2": [checkpoint, "--prompt", "x", "--tp", "3"],
        "parallel.pp = 3 makes 3 stages": [checkpoint, "--prompt", "x", "--pp", "3"],
        "is empty. Each line must be a prompt": [checkpoint, "--prompts", tmp_path / "empty"],
        "cannot be read: KeyError('prompt'). Each line must be a JSON string or an object": [
            checkpoint,
            "--prompts",
            tmp_path / "wrong.jsonl",
        ],
        "missing cannot be read: No such file or directory": [checkpoint, "--prompts", tmp_path / "missing"],
        "--stream supports a single prompt, got 2": [
            checkpoint,
            "--prompt",
            "x",
            "--prompt",
            "y",
            "--stream",
        ],
        "no_such.jinja": [checkpoint, "--chat", "--chat_template", "no_such.jinja"],
    }
    for message, arguments in wrong.items():
        assert message in refusal(*arguments)
