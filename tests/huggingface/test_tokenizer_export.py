"""An export carries the tokenizer that its weights were trained with, in a form in which transformers gives every text
the same ids."""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalite.assembly import parts as build
from megalite.commands import convert as convert_hf
from megalite.commands.generate import main as generate
from megalite.config.load import from_dict
from megalite.data.chat.template import ChatTemplate
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer.identity import of_token_file, of_tokenizer
from megalite.data.tokenizer.tokenizers import Tokenizer, load
from megalite.training.trainer import Trainer
from tests.data.chats import CHATML, INSTRUCT, PLAIN, SHORT, write_lines, write_tokenizer
from tests.huggingface.hf_models import CASES, write

SOURCE = inspect.getsource(inspect)
VOCAB = 448


def lines_of(count: int) -> list[str]:
    """Lines of source code, and made-up ones: of any characters, of white space, of marks that look special."""
    draw = random.Random(0)
    code = draw.sample(SOURCE.splitlines(keepends=True), count * 2 // 3)
    alphabets = [" \t\n\r\u3000a.=", "ab ▁Ġé日語рус<>/s|\x00\x7f🎉\u200d\u0301", "".join(map(chr, range(1, 0xD800, 7)))]
    return code + ["".join(draw.choices(alphabets[i % 3], k=40)) for i in range(count - len(code))] + ["", " ", "  a"]


def prepared(place: Path, tokenizer: str, **options: Any) -> str:
    (place / "text.py").write_text(SOURCE)
    sources = open_inputs([str(place / "text.py")], exclude=[], file_format="text", text_key="text", split="train")
    prepare(sources, place / "data", tokenizer, **options)
    return str(place / "data")


def trained(place: Path, prefix: str, name: str = "run", **sections: dict[str, Any]) -> Path:
    """A checkpoint after one step."""
    model = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
    }
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(place), "name": name},
        "model": {**model, "max_position_embeddings": 64},
        "parallel": {"dp": 1},
        "data": {"train": prefix, "sequence_length": 32},
        "train": {"steps": 4, "global_batch_size": 2, "micro_batch_size": 2},
        "checkpoint": {"load": "none"},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    trainer = Trainer(config := from_dict(tree), build.make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()
    return place / name


def exported(*arguments: str | Path) -> Path:
    assert convert_hf.main(["export", *map(str, arguments)]) == 0
    return Path(arguments[1])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        convert_hf.main(["export", *map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def ids_in(directory: Path) -> tuple[Any, Any]:
    """eos_token_id in both files."""
    return tuple(content(directory / name)["eos_token_id"] for name in ("config.json", "generation_config.json"))


def huggingface(place: Path) -> str:
    return str(write_tokenizer(place / "hf"))


KINDS: dict[str, Callable[[Path], str]] = {
    "sentencepiece": lambda place: prepared(place, str(place / "code.model"), train_tokenizer=VOCAB),
    "byte": lambda place: prepared(place, "byte"),
    "huggingface": lambda place: prepared(place, huggingface(place)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_every_text_the_ids_of_the_training_data(kind, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prefix = KINDS[kind](tmp_path)
    ours: Tokenizer = load(tmp_path / name if (name := of_token_file(prefix).name) != "byte" else name)
    out = exported(trained(tmp_path, prefix), tmp_path / "out")
    assert f"with the tokenizer {of_token_file(prefix).name}\n" in capsys.readouterr().out
    theirs = AutoTokenizer.from_pretrained(out)
    for line in lines_of(600):
        ids = theirs(line, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(line), line
        assert theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == ours.decode(ids), (
            line
        )
    spelled = f"<unk> x{theirs.eos_token}"  # which transformers takes for control tokens by default
    assert theirs(spelled, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ours.encode(spelled)
    assert theirs.eos_token_id == ours.eos and ids_in(out) == (ours.eos, ours.eos)
    assert of_tokenizer(out).is_same(of_token_file(prefix)), "data prepared with the export's tokenizer is the same"
    assert content(out / "megalite.json")["tokenizer"]["fingerprint"] == of_token_file(prefix).fingerprint
    model = AutoModelForCausalLM.from_pretrained(out)
    prompt = theirs("def", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    assert generate([f"hf:{out}", "--prompt", "def", "--tokens", "2"]) == 0


def conversations(place: Path, tokenizer: str, template: str | None, require_end: bool = True) -> str:
    write_lines(place / "chats.jsonl", [{"messages": SHORT}] * 20)
    sources = open_inputs([str(place / "chats.jsonl")], exclude=[], file_format="auto", text_key=None, split="train")
    prepare(sources, place / "chats", tokenizer, Chats(template=template, require_end=require_end))
    return str(place / "chats")


CHATS = {
    "a template in place of the tokenizer's own": (
        lambda place: str(write_tokenizer(place / "hf", INSTRUCT)),
        CHATML,
        "<|im_end|>",
    ),
    "our default template": (lambda place: "byte", None, "<|endoftext|>"),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_model_renders_and_ends_as_it_was_trained(name, tmp_path):
    """transformers renders a conversation to the ids of the training data, and stops at the end of a turn."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make, template, end = CHATS[name]
    tokenizer = make(tmp_path)
    prefix = conversations(tmp_path, tokenizer, template)
    out = exported(trained(tmp_path, prefix, data={"sequence_length": 64}), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(out)
    ours = ChatTemplate(load(tokenizer), template)
    assert theirs.chat_template == ours.source
    assert theirs.apply_chat_template(SHORT, return_dict=True)["input_ids"] == ours.render(SHORT)[0]
    turn = theirs.convert_tokens_to_ids(end)
    result = ids_in(out)
    assert result[0] == result[1] and turn in (result[0] if isinstance(result[0], list) else [result[0]])
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():  # a model that says nothing but the end of the turn
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
    model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(turn), VOCAB).float())
    prompt = theirs.apply_chat_template(SHORT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert said[0, prompt["input_ids"].shape[1] :].tolist() == [turn]


def test_a_line_break_after_a_turn_is_no_end_of_texts(tmp_path):
    tokenizer = huggingface(tmp_path)
    out = exported(
        trained(tmp_path, conversations(tmp_path, tokenizer, PLAIN, False), data={"sequence_length": 64}),
        tmp_path / "out",
    )
    assert ids_in(out) == (load(tokenizer).eos,) * 2


def test_weights_never_leave_with_the_files_of_another_tokenizer(tmp_path, capsys):
    """A model that came with one tokenizer and was trained on the data of another is exported with the second, whatever
    it came with."""
    first, second = (write_tokenizer(tmp_path / name) for name in ("first", "second"))
    path = second / "tokenizer.json"
    changed = content(path)
    vocab = changed["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(changed))
    start = exported(trained(tmp_path, prepared(tmp_path, str(first)), "first_run"), tmp_path / "start")
    (tmp_path / "again").mkdir()
    prefix = prepared(tmp_path / "again", str(second))
    run = trained(
        tmp_path, prefix, "second_run", model={"init_from": f"hf:{start}"}, data={"allow_tokenizer_change": True}
    )
    out = exported(run, tmp_path / "out")
    assert of_tokenizer(out).is_same(of_tokenizer(second)) and not of_tokenizer(out).is_same(of_tokenizer(first))
    said = refused(capsys, run, tmp_path / "like", "--like", start)
    assert f"--like {start} is not the tokenizer of {run}/checkpoints/step_00000001" in said
    assert 'was "b" and is now "a"' in said and "use --allow_tokenizer_change" in said
    assert not (tmp_path / "like").exists()
    like = exported(run, tmp_path / "like", "--like", start, "--allow_tokenizer_change")
    assert of_tokenizer(like).is_same(of_tokenizer(first))
    shutil.rmtree(second)
    capsys.readouterr()
    alone = exported(run, tmp_path / "alone")
    assert (
        "the export does not include a tokenizer" in capsys.readouterr().out and not (alone / "tokenizer.json").exists()
    )
    assert of_tokenizer(alone).is_same(of_tokenizer(out)), "the record remains"
    shutil.copytree(out, tmp_path / "moved")
    assert of_tokenizer(exported(run, tmp_path / "given", "--tokenizer", tmp_path / "moved")).is_same(of_tokenizer(out))


def test_the_card_says_what_was_trained_and_how_to_load_it(tmp_path):
    prefix = prepared(tmp_path, "byte")
    out = exported(trained(tmp_path, prefix), tmp_path / "out")
    head, _, card = (out / "README.md").read_text().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megalite"],
    }
    for row in (
        "| architecture | LlamaForCausalLM |",
        f"| data | {prefix} (",
        "| tokens seen | 64 (2 samples of 32) |",
        "| steps | 1 of 4 |",
    ):
        assert row in card, card
    assert of_token_file(prefix).fingerprint in card and 'AutoTokenizer.from_pretrained("out")' in card
    run = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert run["train"]["global_batch_size"] == 2 and run["data"]["train"] == prefix


def test_an_adapter_leaves_with_the_tokenizer_and_the_place_of_its_base(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    prefix = prepared(tmp_path, "byte")
    start = exported(trained(tmp_path, prefix), tmp_path / "start")
    run = trained(tmp_path, prefix, "adapted", model={"init_from": "hf:start"}, lora={"rank": 2})
    assert convert_hf.main(["adapter-export", str(run), str(tmp_path / "adapter")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter")("é")["input_ids"] == [0xC3, 0xA9]
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f'base_model: "{start}"' in card and "LoRA of rank 2" in card and "PeftModel" in card
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        start
    )


def test_where_transformers_has_rules_of_its_own_the_export_says_so(tmp_path, capsys):
    """transformers gives models of type qwen2 their own pre-tokenization, whatever their files say."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    prefix = prepared(tmp_path, "byte")
    out = exported(trained(tmp_path, prefix, model={"attention_bias": True}), tmp_path / "out")
    text = "e\u0301"
    same = AutoTokenizer.from_pretrained(out)(text)["input_ids"] == list(text.encode())
    assert ("AutoTokenizer encodes some texts differently from byte" in capsys.readouterr().out) == (not same)
    assert ('PreTrainedTokenizerFast.from_pretrained("out")' in (out / "README.md").read_text()) == (not same)
    assert PreTrainedTokenizerFast.from_pretrained(out)(text)["input_ids"] == list(text.encode())


def test_a_template_that_is_gone_is_missed(tmp_path, capsys):
    prefix = conversations(tmp_path, "byte", None)
    run = trained(tmp_path, prefix, data={"sequence_length": 64})
    facts = content(Path(f"{prefix}.json"))
    facts["chat"]["template"] = CHATML
    Path(f"{prefix}.json").write_text(json.dumps(facts))
    out = exported(run, tmp_path / "out")
    assert (
        f"the chat template that the model was trained with (hash {facts['chat']['template_hash']}) was not found"
        in capsys.readouterr().out
    )
    assert not (out / "chat_template.jinja").exists()


TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}"


def in_settings(place: Path) -> None:
    """Named templates as transformers 4 stored them."""
    settings = content(place / "tokenizer_config.json")
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": TOOLS}]
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))


def in_files(place: Path) -> None:
    """As transformers 5 stores them, with a template in the settings that is not read any more."""
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    (place / "chat_template.jinja").write_text("old")
    (place / "tokenizer_config.json").write_text(
        json.dumps(content(place / "tokenizer_config.json") | {"chat_template": "older"})
    )


@pytest.mark.parametrize("store", [in_settings, in_files])
def test_chat_templates_with_other_names_leave_with_the_tokenizer(store: Callable[[Path], None], tmp_path: Path):
    """The default one is that of the training data; every reader then finds it."""
    from transformers import AutoTokenizer

    tokenizer = write_tokenizer(tmp_path / "hf")
    store(tokenizer)
    run = trained(tmp_path, conversations(tmp_path, str(tokenizer), CHATML), data={"sequence_length": 64})
    out = exported(run, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).chat_template == {"default": CHATML, "tool_use": TOOLS}
    assert "chat_template" not in content(out / "tokenizer_config.json")


def test_templates_come_in_and_go_out(tmp_path: Path):
    """Those of an imported model; one in the settings that a file replaces is left out."""
    from transformers import AutoTokenizer

    model = write(
        CASES["llama, one key-value head"]._replace(
            fields=CASES["llama, one key-value head"].fields | {"vocab_size": VOCAB}
        ),
        tmp_path / "hf",
    )
    in_files(write_tokenizer(model))
    assert convert_hf.main(["import", str(model), str(tmp_path / "ours")]) == 0
    out = exported(tmp_path / "ours", tmp_path / "out")
    expected = AutoTokenizer.from_pretrained(model).chat_template
    assert AutoTokenizer.from_pretrained(out).chat_template == expected == {"default": "old", "tool_use": TOOLS}
    assert "chat_template" not in content(out / "tokenizer_config.json")
