"""Preference data: tokens and completions are TRL's, other projects' records give the same, and what is wrong is said
with its record."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.commands import prepare as command
from megalite.config.sections.data import DataConfig
from megalite.data.chat.preference_records import PreferenceReader
from megalite.data.chat.records import BadRecord
from megalite.data.dataset import build
from megalite.data.indexed import CHOSEN, REJECTED, IndexedTokens
from megalite.data.loader import Loader
from megalite.mesh.layout import AxisPlace
from tests.data.chats import CHATML, CONTROLS, unmarked, write_lines

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = unmarked(CHATML)
TEMPLATE = "{% if tools %}{{ '<|im_start|>tools\\n' ~ tools | tojson }}{% endif %}" + TEMPLATE
WORDS = "the sky is blue green and the sun is in the sky answer question be brief it is what color of course not "


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


BRIEF, SKY, THANKS = {"role": "system", "content": "Be brief."}, user("What color is the sky?"), user("Thanks, and?")
ASKED = [
    {"prompt": [BRIEF, SKY], "chosen": [said("It is blue.")], "rejected": [said("Green, of course.")]},
    {"prompt": [SKY], "chosen": [said("Blue."), THANKS, said("Not at all.")], "rejected": [said("Blue. ")]},
    {"prompt": [SKY, said("Blue."), THANKS], "chosen": [said("a")], "rejected": [said("b" * 40)]},
    {"prompt": [SKY], "chosen": [said("It is")], "rejected": [said("It is not")], "tools": json.dumps(TOOLS)},
]
IMPLICIT = [
    {
        "chosen": record["prompt"] + record["chosen"],
        "rejected": record["prompt"] + record["rejected"],
        "tools": record.get("tools"),
    }
    for record in ASKED
]
PLAIN = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green, of course"},
    {"prompt": "The sk", "chosen": "y is blue</s>", "rejected": "ies"},
    {"prompt": "The sky ", "chosen": "is", "rejected": " is not the question. " * 4},
]
PREFIXED = [
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"chosen": "The sky is not", "rejected": "The sky is nothing"},
    {"chosen": "It is", "rejected": "It is not blue"},
    {"chosen": "It is Zz", "rejected": "It is Qq"},  # the space is a token of its own
]
PAIRS = {"conversations": ASKED, "implicit": IMPLICIT, "texts": PLAIN, "prefixed": PREFIXED}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE with merges across the end of prompts, that begins texts with BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator([WORDS] * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    raw.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    bos = raw.token_to_id("<s>")
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<|sep|>", chat_template=TEMPLATE
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, tokenizer):
    """run(records, …) → what `megalite prepare --preference` prints as JSON, of records in a.jsonl → x."""
    monkeypatch.chdir(tmp_path)

    def call(records: list[Any], *options: str, output: str = "x") -> dict[str, Any]:
        write_lines(tmp_path / "a.jsonl", records)
        arguments = ["--input", "a.jsonl", "--tokenizer", str(tokenizer), "--output", output, "--json", "--overwrite"]
        preference = () if "--preference" in options else ("--preference",)
        monkeypatch.setattr(sys, "argv", ["megalite prepare", *arguments, *preference, *options])
        command.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


def documents(prefix: str = "x") -> list[tuple[list[int], list[int]]]:
    """The tokens of each document, and what PREFIX.loss says of them."""
    file, at, pieces = IndexedTokens(prefix), 0, []
    assert file.loss is not None
    for size in file.sizes.tolist():
        pieces.append((file.tokens[at : at + size].tolist(), file.loss.tokens[at : at + size].tolist()))
        at += size
    return pieces


def of_trl(trainer: Any, collator: Any, tokenizer: Path, records: list[Any], max_length: int | None, mode: str) -> Any:
    """The batch that TRL makes of records: its trainer's preparation, then its collator."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    keys = {key for record in records for key in record}
    columns = {key: [record.get(key) for record in records] for key in keys}
    theirs = AutoTokenizer.from_pretrained(str(tokenizer))
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode=mode)
    rows = trainer._prepare_dataset(
        SimpleNamespace(_tokenizer=theirs, calculate_KL=False), Dataset.from_dict(columns), theirs, arguments, "eval"
    )
    return collator([rows[i] for i in range(len(rows))])


def unpadded(batch: Any) -> list[tuple[list[int], list[int]]]:
    sizes = batch["attention_mask"].sum(1).tolist()
    masks = batch["completion_mask"].tolist()
    return [
        (ids[:size], mask[:size]) for ids, mask, size in zip(batch["input_ids"].tolist(), masks, sizes, strict=True)
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_those_of_trl(name, run, tokenizer):
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    records = PAIRS[name]

    def theirs(max_length: int | None = None, mode: str = "keep_start") -> list[tuple[list[int], list[int]]]:
        collator = DataCollatorForPreference(0, max_length=max_length, truncation_mode=mode)
        chosen_first = unpadded(of_trl(DPOTrainer, collator, tokenizer, records, max_length, mode))
        assert len(chosen_first) == 2 * len(records), "TRL has dropped nothing"
        in_pairs = [chosen_first[i :: len(records)] for i in range(len(records))]
        return [
            (tokens, [value * counts for counts in mask])
            for pair in in_pairs
            for (tokens, mask), value in zip(pair, (CHOSEN, REJECTED), strict=True)
        ]

    whole = theirs()
    result = run(records)
    assert documents() == whole and result["documents"] == len(whole) and not result["too_long"]
    assert json.loads(Path("x.json").read_text())["preference"] == "pairs"
    past_prompts = max(loss.count(0) for _, loss in whole) + 1
    for limit, mode, ours in ((past_prompts, "keep_start", "truncate"), (4, "keep_end", "keep_end")):
        result = run(records, "--max_length", str(limit), "--too_long", ours)
        assert documents() == theirs(limit, mode) != whole and result["too_long"], mode


LABELLED = {
    "conversations": [
        {"prompt": record["prompt"], "completion": record[key], "label": key == "chosen"}
        for record in ASKED[:3]
        for key in ("rejected", "chosen")
    ],
    "texts": [{"prompt": r["prompt"], "completion": r["rejected"], "label": i != 1} for i, r in enumerate(PLAIN)],
}


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_completions_are_those_of_trl(name, run, tokenizer):
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    records = LABELLED[name]
    batch = of_trl(KTOTrainer, DataCollatorForUnpairedPreference(0), tokenizer, records, None, "")
    result = run(records)
    values = [CHOSEN if label else REJECTED for label in batch["label"].tolist()]
    assert documents() == [
        (ids, [value * counts for counts in mask]) for (ids, mask), value in zip(unpadded(batch), values, strict=True)
    ]
    assert (result["chosen"], result["rejected"]) == (values.count(CHOSEN), values.count(REJECTED))
    assert json.loads(Path("x.json").read_text())["preference"] == "labelled"


OTHERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "axolotl's chat_template": ({"messages": [BRIEF, SKY], "chosen": said("a"), "rejected": said("b")}, ()),
    "axolotl's argilla": (
        {"system": "Be brief.", "instruction": SKY["content"], "chosen_response": "a", "rejected_response": "b"},
        ("--keys", "chosen=chosen_response,rejected=rejected_response"),
    ),
    "axolotl's intel": (
        {"system": "Be brief.", "question": SKY["content"], "chosen": "a", "rejected": "b"},
        ("--keys", "instruction=question"),
    ),
    "axolotl's ultra": (
        {"prompt": "is left out", "chosen": [BRIEF, SKY, said("a")], "rejected": [BRIEF, SKY, said("b")]},
        (),
    ),
    "LLaMA-Factory's sharegpt": (
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": SKY["content"]}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        (),
    ),
    "LLaMA-Factory's alpaca": (
        {"system": "Be brief.", "instruction": SKY["content"], "input": "", "chosen": "a", "rejected": "b"},
        (),
    ),
    "a column of texts": ({"prompt": [BRIEF, SKY], "chosen": "a", "rejected": "b"}, ()),
    "UltraFeedback's": (
        {
            "prompt": SKY["content"],
            "chosen": [BRIEF, SKY, said("a")],
            "rejected": [BRIEF, SKY, said("b")],
            "messages": [BRIEF, SKY, said("a")],
        },
        (),
    ),
    "a whole conversation beside a prompt": (
        {"prompt": [BRIEF, SKY], "chosen": "a", "rejected": "b", "messages": [SKY, said("a")]},
        (),
    ),
    "a whole conversation beside an instruction": (
        {"system": "Be brief.", "instruction": SKY["content"], "chosen": "a", "rejected": "b", "messages": [said("a")]},
        (),
    ),
    "a system text beside messages": (
        {"system": "Be brief.", "chosen": [SKY, said("a")], "rejected": [SKY, said("b")]},
        (),
    ),
}


def test_records_of_other_projects_give_the_same_pairs(run):
    run([{"prompt": [BRIEF, SKY], "chosen": [said("a")], "rejected": [said("b")]}])
    expected = documents()
    for name, (record, options) in OTHERS.items():
        run([record], *options)
        assert documents() == expected, name


def test_conversations_with_labels(run):
    """As LLaMA-Factory's kto_tag: the last answer is judged. A pair may be two labelled completions."""
    pair = {"prompt": [BRIEF, SKY], "chosen": [said("a")], "rejected": [said("b")]}
    run([pair], "--preference", "labelled")
    expected = documents()
    assert [max(loss) for _, loss in expected] == [CHOSEN, REJECTED]
    turns = [{"from": "human", "value": SKY["content"]}, {"from": "gpt", "value": "a"}]
    bad = {"system": "Be brief.", "instruction": SKY["content"], "output": "b", "label": 0}
    run([{"system": "Be brief.", "conversations": turns, "kto_tag": True}, bad])
    assert documents() == expected
    whole = {"prompt": [BRIEF, SKY], "completion": "a", "label": True, "messages": [BRIEF, SKY, said("a")]}
    run([whole, bad])
    assert documents() == expected, "a prompt comes before a whole conversation"
    run([{"messages": [SKY, said("a"), THANKS, said("b")], "label": True}])
    (_, loss), (_, first) = documents()[0], expected[0]
    assert loss.count(CHOSEN) == first.count(CHOSEN), "the last answer alone"


def test_completions_are_mismatched_with_other_prompts(run):
    """Those of one prompt, which `--preference labelled` writes side by side, are passed over."""

    def mismatched(records: list[Any]) -> list[tuple[int, ...]]:
        """(document of the prompt, document of the completion) of each row of a batch of all documents."""
        run(records, "--preference", "labelled")
        texts = [(tokens[: loss.count(0)], tokens[loss.count(0) :]) for tokens, loss in documents()]
        data, _ = build(DataConfig(train="x", sequence_length=120, shuffle=False, packing=False), seed=0)
        place = AxisPlace(size=1, rank=0)
        loader = Loader(data, global_batch_size=len(texts), micro_batch_size=1, dp=place, samples=len(texts))
        loader.mismatches = True
        rows = [each.mismatched for each in next(loader.epoch())]
        loader.close()
        completions = []
        for own, row in enumerate(rows):
            prompt = texts[own][0]
            text = [*row.tokens[:1, 0].tolist(), *row.targets[row.targets >= 0].tolist()]
            assert text[: len(prompt)] == prompt
            completions.append([text[len(prompt) :] == completion for _, completion in texts].index(True))
        return list(enumerate(completions))

    assert mismatched(PLAIN) == [(0, 5), (1, 5), (2, 1), (3, 1), (4, 3), (5, 3)]
    assert mismatched(PLAIN[:1]) == [(0, 1), (1, 0)], "there is no other prompt"


def test_the_prompt_is_cut_first(run):
    records = [{"prompt": [SKY], "chosen": [said("It is blue.")], "rejected": [said("No")]}]
    run(records)
    (chosen, loss), (rejected, _) = documents()
    completion, prompt = loss.count(CHOSEN), loss.count(0)
    run(records, "--max_length", str(completion + 3), "--too_long", "truncate_prompt")
    assert documents() == [
        (chosen[prompt - 3 :], [0] * 3 + [CHOSEN] * completion),
        (rejected[prompt - 3 :], [0] * 3 + [REJECTED] * (len(rejected) - prompt)),
    ], "both halves keep the same prompt"
    run(records, "--max_length", str(completion), "--too_long", "truncate_prompt")
    assert documents()[0] == (chosen[prompt - 1 : -1], [0] + [CHOSEN] * (completion - 1))
    result = run([*records, {**records[0], "chosen": [said("no")]}], "--max_length", str(len(chosen) - 1))
    assert (result["documents"], result["too_long"]) == (2, 1), "pairs are dropped whole"


@pytest.mark.parametrize("options", [[], ["--max_length", "40"]], ids=["as long as they are", "of a maximum length"])
def test_rows_of_the_length_that_is_told_hold_every_pair(options, run):
    """The number of rows that is told is that of a run with data.packing."""
    result = run(PLAIN, *options)
    config = DataConfig(train="x", sequence_length=result["row_length"], packing=True)
    data, _ = build(config, seed=0)
    assert data.samples_per_epoch == result["packed_rows"]
    longest = max(len(tokens) for tokens, _ in documents())
    assert result["row_length"] == 80 if options else result["row_length"] <= 2 * longest


def test_equal_halves_are_counted(run, capsys, monkeypatch):
    result = run([ASKED[0], {**ASKED[0], "rejected": ASKED[0]["chosen"]}])
    assert (result["documents"], result["equal"], result["chosen"], result["rejected"]) == (4, 1, 2, 2)
    monkeypatch.setattr(sys, "argv", [argument for argument in sys.argv if argument != "--json"])
    command.main()
    assert "WARNING: in 1 pair chosen and rejected have the same tokens" in capsys.readouterr().out


BAD: dict[str, tuple[Any, str]] = {
    "one half": ({"prompt": "a", "chosen": "b", "rejected": None}, r" has chosen but no rejected\. Add it"),
    "neither": ({"prompt": "a"}, " has neither chosen and rejected nor label; its keys are prompt"),
    "other names": ({"prompt": "a", "accepted": "b"}, "add --keys chosen=accepted"),
    "an empty text": ({"prompt": "a", "chosen": "", "rejected": "b"}, r": chosen is empty\. Remove"),
    "an empty message": ({"prompt": [SKY], "chosen": [said("a")], "rejected": [said("")]}, ": rejected is empty"),
    "no messages": ({"prompt": [SKY], "chosen": [said("a")], "rejected": []}, ": rejected is empty"),
    "mixed": ({"prompt": "a", "chosen": "b", "rejected": [said("a")]}, "both be texts or both messages, got str and"),
    "no prompt": ({"chosen": [SKY], "rejected": [said("a")]}, "begin with different messages, so there is no prompt"),
    "a label": ({"prompt": "a", "completion": "b", "label": "maybe"}, r" has an invalid label 'maybe'\. It must be"),
    "no completion": ({"messages": [SKY], "label": True}, " has a label but no completion"),
    "only an answer": ({"messages": [said("a")], "label": True}, " has a completion but no message before it"),
    "a weight": ({"prompt": [SKY], "chosen": [{**said("a"), "weight": 2}], "rejected": "b"}, "of chosen has a weight"),
    "options": ({"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": {"a": 1}}, "not supported"),
    "system": ({"system": "a", "prompt": "a", "chosen": "b", "rejected": "c"}, "--keys instruction=prompt"),
    "an answered prompt": ({"messages": [SKY, said("a")], "chosen": "a", "rejected": "b"}, "end in a turn of the"),
    "an unread question": (
        {"system": "Be brief.", "question": "Add 1 and 2.", "chosen": "3", "rejected": "4"},
        "its keys system, question are not.*--keys instruction=question",
    ),
    "an unread input": ({"input": "Add 1 and 2.", "chosen": "3", "rejected": "4"}, "--keys instruction=input"),
    "a question that both leave out": (
        {"question": "Add 1 and 2.", "chosen": "It is 3", "rejected": "It is 4"},
        "its keys question are not",
    ),
    "unread messages": ({"convo": [SKY], "chosen": said("a"), "rejected": said("b")}, "--keys messages=convo"),
    "an unread question of a label": ({"question": "Why so?", "completion": "b", "label": 1}, "instruction=question"),
    "no object": ("a", " is a str, not an object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_named(name):
    record, problem = BAD[name]
    with pytest.raises(BadRecord, match=f"line 3.*{problem}"):
        PreferenceReader().read(record, "line 3")


def test_pairs_without_anything_else_have_no_prompt(run):
    run([{"chosen": "yes", "rejected": "no", "id": 3, "url": "https://example.com"}])
    assert documents()[0][1][:2] == [0, CHOSEN], "BOS alone comes before them"


def test_names_that_no_record_has_are_told(run, capsys):
    options = ["--keys", "messages=convo,content=said,instruction=question"]
    run([{"question": "Why?", "chosen": "a", "rejected": "b"}], *options)
    command.main()  # again: `run` has read what it printed
    printed = capsys.readouterr().err
    assert (
        "messages=convo has no effect" in printed
        and "content=said has no effect" in printed
        and "question=" not in printed
    )


def test_bad_input(run, capsys):
    def refused(records: list[Any], *options: str) -> str:
        with pytest.raises(SystemExit):
            run(records, *options)
        return capsys.readouterr().err

    pair, labelled = PLAIN[0], {"prompt": "The sky is", "completion": " blue", "label": True}
    assert "a.jsonl line 2 has no chosen and rejected, and earlier records are pairs" in refused([pair, labelled])
    run([labelled, pair])
    assert len(documents()) == 3, "a pair among labelled completions is two of them"
    said_ = refused([ASKED[0], pair], "--max_length", "10", "--too_long", "truncate")
    assert "a.jsonl line 1: the prompt has " in said_ and "so --max_length 10 leaves no token" in said_
    said_ = refused([pair, ASKED[0]], "--max_length", "3")
    assert "no preference can be trained on: 2 preferences were longer than --max_length 3. Nothing was" in said_
    assert re.search(r"The shortest of them has \d+ tokens: raise --max_length, or pass --too_long truncate\.", said_)
    shortest = re.search(r"has (\d+) tokens", said_)[1]
    assert len(run([pair, ASKED[0]], "--max_length", shortest)["forms"]) == 1, "that one is kept"
    assert "--chat and --preference exclude each other" in refused([pair], "--chat")
    assert "--loss_on can only be used with --chat" in refused([pair], "--loss_on", "all")
    assert "--too_long keep_end requires --max_length" in refused([pair], "--too_long", "keep_end")
    assert run([pair, {"chosen": "a"}], "--skip_bad", "1")["skipped"] == 1
