"""YAML and command line → Config, and how a wrong configuration ends."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megalite.config import help as help_page
from megalite.config import load as loading
from megalite.config import values
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, load_config, to_dict, to_yaml, with_home
from megalite.config.schema import OPTIONS, Config
from megalite.config.suggestions import other_names
from megalite.config.token_files import unused
from megalite.objectives.find import OBJECTIVES


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A directory with a token file of 257 tokens; a process that torchrun has not started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("tokens.bin", "tokens.idx", "more.bin", "more.idx"):
        (tmp_path / name).touch()
    (tmp_path / "tokens.json").write_text('{"vocab_size": 257, "eos": 256}')
    return tmp_path


def load(*argv: str, world_size: int = 1, text: str | None = None) -> Config:
    if text is not None:
        Path("run.yaml").write_text(text)
        argv = ("--config", "run.yaml", *argv)
    return load_config(["--data.train", "tokens", *argv], world_size=world_size)


def refusal(capsys, *argv: str, text: str | None = None, status: int = 2) -> str:
    with pytest.raises(SystemExit) as end:
        load(*argv, text=text)
    captured = capsys.readouterr()
    assert end.value.code == status and captured.out == ""
    assert captured.err.endswith("\n") and captured.err.count("\n") == 1, "one message on one line"
    return captured.err.strip()


def test_precedence_is_default_then_preset_then_yaml_then_command_line():
    text = (
        "model: {preset: llama-3-8b, num_hidden_layers: 6, num_attention_heads: 16}\noptimizer: {lr: 3e-4, "
        "warmup_steps: 3}"
    )
    config = load("--model.num_attention_heads", "8", "--optimizer.warmup_steps=2", text=text)
    model = config.model
    # preset, YAML, command line
    assert (model.hidden_size, model.num_hidden_layers, model.num_attention_heads) == (4096, 6, 8)
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.eps) == (
        3e-4,
        2,
        Config().optimizer.eps,
    )


def test_an_explicit_value_equal_to_the_default_still_overrides_a_preset():
    assert load("--model.preset", "llama-3-8b", "--model.rope_theta", "10000").model.rope_theta == 10000.0
    assert load(text="model: {preset: llama-3-8b, num_key_value_heads: null}").model.num_key_value_heads is None


def test_the_command_line_wins_wherever_config_stands_and_later_files_win_over_earlier():
    Path("second.yaml").write_text("train: {steps: 7}")
    config = load(
        "--train.micro_batch_size",
        "2",
        "--config",
        "second.yaml",
        text="train: {steps: 5, micro_batch_size: 4, grad_clip: 2}",
    )
    assert (config.train.steps, config.train.micro_batch_size, config.train.grad_clip) == (7, 2, 2.0)


def test_faults_on_the_command_line_are_words_or_a_list():
    assert load("--faults", "kill:rank=0,step=7 nan:step=9-12").faults.inject == "kill:rank=0,step=7 nan:step=9-12"
    assert (
        load("--faults=slow:rank=0,step=7,seconds=0.5", "--faults.rollback", "true").faults.inject
        == "slow:rank=0,step=7,seconds=0.5"
    )
    assert load(text="faults:\n  inject:\n    - kill:rank=0,step=7\n").faults.inject == ["kill:rank=0,step=7"]


def test_short_forms_and_default_dp():
    config = load("--tp", "2", "--pp=2", "--zero", "0", "--cp", "1", world_size=8)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp, config.parallel.zero) == (2, 2, 2, 0)
    assert load("--dp", "4", world_size=4).parallel.dp == 4


def test_vocabulary_comes_from_the_data_unless_given():
    assert load().model.vocab_size == 257
    assert load("--model.vocab_size", "300").model.vocab_size == 300
    assert load("--model.preset", "gpt2-124m").model.vocab_size == 50257


def test_shape_from_a_hugging_face_directory(here):
    content = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
    }
    (here / "config.json").write_text(
        json.dumps(content | {"num_key_value_heads": 2, "rope_theta": 1e6, "vocab_size": 999})
    )
    model = load("--model.from_hf", ".", "--model.num_hidden_layers", "2").model
    assert (model.hidden_size, model.num_hidden_layers, model.rope_theta, model.attention_bias, model.vocab_size) == (
        64,
        2,
        1e6,
        True,
        999,
    )


@pytest.mark.parametrize(
    "argv, option, value",
    [
        (["--data.validation", "0.1"], "data.validation", 0.1),
        (["--data.validation", "more"], "data.validation", "more"),
        (["--data.train", "[tokens, more]"], "data.train", ["tokens", "more"]),
        (["--data.train", "{tokens: 1, more: 0.5}"], "data.train", {"tokens": 1.0, "more": 0.5}),
        (["--optimizer.betas", "[0.8, 0.9]"], "optimizer.betas", [0.8, 0.9]),
        (
            ["--model.rope_scaling", "{rope_type: linear, factor: 2}"],
            "model.rope_scaling",
            {"rope_type": "linear", "factor": 2},
        ),
        (["--run.name", "2024"], "run.name", "2024"),
        (["--model.init_from", "none"], "model.init_from", "none"),
        (["--model.init_from", "null"], "model.init_from", None),
        (["--run.deterministic", "true"], "run.deterministic", True),
        (["--model.preset", "llama-3-8b", "--model.num_key_value_heads", "null"], "model.num_key_value_heads", None),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--train.stop_after", "90m"], "train.stop_after", "90m"),
        (["--checkpoint.allow", "[data]"], "checkpoint.allow", ["data"]),
        (["--model.no_rope_layers", "[3]"], "model.no_rope_layers", [3]),
        *(
            (["--data.sequence_length", "64", f"--{option}", word], option, value)
            for option in ("logging.wandb", "logging.tensorboard")
            for word, value in {"true": True, "false": False, "null": None, "name": "name", "2024": "2024"}.items()
        ),
    ],
)
def test_values_are_converted_alike_from_command_line_and_yaml(argv, option, value):
    section, key = option.split(".")
    from_words = getattr(getattr(load(*argv), section), key)
    text = yaml.safe_dump({section: {key: value}})
    Path("same.yaml").write_text(text)
    config = load_config(
        ["--config", "same.yaml", *(() if section == "data" and key == "train" else ("--data.train", "tokens"))],
        world_size=1,
    )
    from_yaml = getattr(getattr(config, section), key)
    assert from_words == value and from_yaml == value and type(from_words) is type(from_yaml) is type(value)


def test_without_a_configuration_it_says_how_to_start(capsys):
    with pytest.raises(SystemExit) as end:
        load_config([], world_size=1)
    printed = capsys.readouterr().err
    assert (
        end.value.code == 2
        and "--config quickstart" in printed
        and "--list_configs" in printed
        and "--help [SECTION]" in printed
    )


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (("q", "v"), "lora.targets", ["q", "v"]),
        (("q,v",), "lora.targets", ["q", "v"]),
        (("q,", "v"), "lora.targets", ["q", "v"]),
        (("[q,", "v]"), "lora.targets", ["q", "v"]),
        (("q",), "lora.targets", ["q"]),
        (("null",), "lora.targets", None),
        (("3", "1"), "parallel.partition", [3, 1]),
        (("3,1",), "parallel.partition", [3, 1]),
        (("0.9,", "0.99"), "optimizer.betas", [0.9, 0.99]),
        (("a,b",), "data.train", "a,b"),
        (("a", "b"), "data.train", ["a", "b"]),
    ],
)
def test_a_list_needs_no_brackets(words, option, value):
    arguments = loading.read_arguments([f"--{option}", *words, "--run.name", "after"])
    assert values.parse_values(arguments.overrides, "on the command line", words=True) == {
        option: value,
        "run.name": "after",
    }


def test_a_list_in_a_file_needs_no_brackets():
    Path("list.yaml").write_text(
        "lora:\n  rank: 2\n  targets: q, v\nparallel:\n  partition: 3,1\nmodel:\n  from_hf: null\n"
    )
    config = loading.resolve(loading.read_arguments(["--config", "list.yaml"]), 1)
    assert (config.lora.targets, config.parallel.partition) == (["q", "v"], [3, 1])


def test_help_names_every_objective(capsys):
    with pytest.raises(SystemExit):
        load_config(["--help", "train"], world_size=1)
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {*OBJECTIVES, "cross_entropy", "distillation", "extensions"} <= words


def test_help_of_one_section(capsys):
    with pytest.raises(SystemExit) as end:
        load_config(["--help", "lora"], world_size=1)
    printed = capsys.readouterr().out
    assert (
        end.value.code == 0
        and printed.startswith("lora:\n  --lora.rank")
        and "--model." not in printed.split("lora.targets")[0]
    )
    assert {option for option in OPTIONS if f"--{option} " in printed or f"--{option}\n" in printed} == {
        option for option in OPTIONS if option.startswith("lora.")
    }


def test_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    home = str(Path.cwd())
    assert load("--run.dir", "~/runs").run.dir == f"{home}/runs"
    assert load_config(["--data.train", "{~/tokens: 1.0}"], world_size=1).data.train == {f"{home}/tokens": 1.0}
    assert with_home(["hf:~/m", "scores:~/s", "~/x", "a~b"]) == [f"hf:{home}/m", f"scores:{home}/s", f"{home}/x", "a~b"]


def test_what_other_projects_call_an_option_names_one_of_ours():
    options_named = {option for here in other_names().values() for option in re.findall(r"\b[a-z]+\.[a-z_0-9]+", here)}
    assert options_named and options_named <= OPTIONS.keys()
    ours = {option.split(".")[-1] for option in OPTIONS}
    assert not ours & other_names().keys(), "these are suggested by their name alone"


MESSAGES = [
    (["--tpp", "2"], None, "--tpp on the command line is not a known option. Nearest: --tp."),
    (
        ["--hidden_size", "2"],
        None,
        "--hidden_size on the command line is not a known option. Nearest: --model.hidden_size.",
    ),
    (
        ["--nproc", "2"],
        None,
        "--nproc is only valid when starting ranks. Remove it: a dry run starts none",
    ),
    (
        ["--train.lr", "2"],
        None,
        "--train.lr on the command line is not a known option. Nearest: --optimizer.lr or --muon.lr.",
    ),
    (["--optimizer.weight_dcay=2"], None, "Nearest: --optimizer.weight_decay."),
    (
        ["--optimizer.learning_rate", "1"],
        None,
        "--optimizer.learning_rate on the command line is not a known option. The option is called --optimizer.lr.",
    ),
    (["--tensor-model-parallel-size", "2"], None, "is not a known option. The option is called --parallel.tp."),
    (["--gradient_accumulation_steps", "2"], None, "The option is called train.global_batch_size = accumulation steps"),
    (
        [],
        "train: {per_device_train_batch_size: 2}",
        "in run.yaml is not a known option. The option is called train.micro_batch_size.",
    ),
    ([], "modle: {hidden_size: 2}", "modle in run.yaml is not a known option. Nearest: model."),
    ([], "model: {hiden_size: 2}", "model.hiden_size in run.yaml is not a known option. Nearest: model.hidden_size."),
    (
        [],
        "model.hidden_size: 2",
        "model.hidden_size in run.yaml is written in one piece. Write `model:` and, indented below it, `hidden_size:`.",
    ),
    ([], "model: 3", "model = 3 in run.yaml is not a section."),
    ([], "[model]", '["model"] in run.yaml is not a set of sections.'),
    ([], "model: {", "--config = run.yaml is not valid YAML: "),
    ([], "train: {steps: 1, steps: 2}", "the key steps appears twice in line 1"),
    (
        ["--config", "rum.yaml"],
        "",
        "--config = rum.yaml cannot be read: No such file or directory. Nearest: run.yaml.",
    ),
    (
        ["--config", "nope.yaml"],
        "",
        "nope.yaml cannot be read: No such file or directory. Give the path of a YAML file, or a name of",
    ),
    (["--tp"], None, "--tp on the command line has no value. Write --tp VALUE."),
    (["--tp", "--pp", "2"], None, "--tp on the command line has no value."),
    (["--run.name", "a", "b"], None, "b on the command line belongs to no option. Write --section.key VALUE."),
    (
        ["--run.name", "a", "quickstart"],
        None,
        "quickstart on the command line belongs to no option. Write --config quickstart.",
    ),
    (
        ["--run.name", "a", "quickstrat"],
        None,
        "quickstrat on the command line belongs to no option. Write --config quickstart.",
    ),
    (
        ["--run.name", "a", "run.yaml"],
        None,
        "run.yaml on the command line belongs to no option. Write --config run.yaml.",
    ),
    (["--run.name", "a", "tp=2"], None, "tp=2 on the command line belongs to no option. Write --tp 2."),
    (
        ["-optimizer.lr", "1"],
        None,
        "-optimizer.lr on the command line belongs to no option. Write --optimizer.lr VALUE.",
    ),
    (["--train.compile"], None, "--train.compile on the command line has no value. Write --train.compile true."),
    (["--help", "optimzer"], None, "--help optimzer: there is no such section. Nearest: optimizer."),
    (["--help", "optimzer.lr"], None, "--help optimzer.lr: there is no such section. Nearest: optimizer."),
    (["--world_size", "8"], None, "--world_size is only valid for a dry run. Add --dry_run or remove it."),
    (["--optimizer.learing_rate", "1"], None, "Nearest: --optimizer.lr, called learning_rate in other programs."),
    (["--learningrate", "1"], None, "Nearest: --optimizer.lr, called learning_rate in other programs."),
    (["--optmizer.lr", "1"], None, "--optmizer.lr on the command line is not a known option. Nearest: --optimizer.lr."),
    (["--optimizer.warmup", "1"], None, "Nearest: --optimizer.warmup_steps."),
    (["--train.max_step", "1"], None, "Nearest: --train.steps, called max_steps in other programs."),
    (["--logging.evry", "1"], None, "Nearest: --logging.interval, called logging.every in other programs."),
    (["--loging.every", "1"], None, "Nearest: --logging.interval, called logging.every in other programs."),
    (
        ["--batchsize", "1"],
        None,
        "Nearest: --train.micro_batch_size (of a rank) or train.global_batch_size (of all ranks), called",
    ),
    (["--model.n_layer", "1"], None, "The option is called --model.num_hidden_layers."),
    (["--seq_lenght", "1"], None, "Nearest: --data.sequence_length, called seq_length in other programs."),
    (
        ["--hidden_dim", "1"],
        None,
        "The option is called --model.hidden_size (of the model) or model.intermediate_size (of the feed-forward).",
    ),
    (["--num_layers", "1"], None, "The option is called --model.num_hidden_layers."),
    (["--max_steps", "1"], None, "The option is called --train.steps."),
    (["--fp16", "true"], None, "The option is called --train.precision fp16."),
    (["--bf16", "true"], None, "The option is called --train.precision bf16."),
    (
        [],
        "learing_rate: 1",
        "learing_rate in run.yaml is not a known option. Nearest: optimizer.lr, called "
        "learning_rate in other programs.",
    ),
    (
        [],
        "fp16: true",
        "fp16 = true in run.yaml is not a section. Its keys are those of the loss scale; for fp16 itself write, below "
        "`train:`",
    ),
    (["--tp", "two"], None, "parallel.tp = two on the command line is not an integer."),
    (["--tp", "1.5"], None, "parallel.tp = 1.5 on the command line is not an integer."),
    (
        [],
        "network: {variables: {1: x}}",
        "network.variables in run.yaml has the name 1, which is not a string. Quote it: '1'.",
    ),
    ([], "parallel: {tp: true}", "parallel.tp = true in run.yaml is not an integer."),
    ([], "train: {grad_clip: null}", "train.grad_clip = null in run.yaml is not a number."),
    (["--model.hidden_act", "null"], None, "model.hidden_act = null on the command line is not one of silu, gelu, "),
    ([], "optimizer: {lr: fast}", "optimizer.lr = fast in run.yaml is not a number."),
    ([], "run: {name: 2024}", "run.name = 2024 in run.yaml is not text. Write it in quotes: '2024'."),
    (["--optimizer.decay", "cosin"], None, "is not one of cosine, linear, wsd, constant. Nearest: cosine."),
    (["--train.precision", "bfloat16"], None, "is not one of auto, fp32, bf16, fp16, fp64. Nearest: bf16."),
    (["--train.precision", "float16"], None, "Nearest: fp16."),
    (["--train.precision", "torch.float32"], None, "Nearest: fp32."),
    (["--model.hidden_act", "swiglu"], None, "Nearest: silu."),
    (["--train.compile", "0"], None, "train.compile = 0 on the command line is not true or false. Nearest: false."),
    (["--network.debug", "INFOS"], None, "is not one of VERSION, WARN, INFO, TRACE, or null. Nearest: INFO."),
    (
        ["--model.preset", "meta-llama/Llama-3.2-1B"],
        None,
        "is a Hugging Face model. Set model.from_hf to meta-llama/Llama-3.2-1B, and remove",
    ),
    (["--train.precision", "fp8"], None, "is not one of auto, fp32, bf16, fp16, fp64."),
    (
        ["--train.compile", "ture"],
        None,
        "train.compile = ture on the command line is not true or false. Nearest: true.",
    ),
    (["--model.no_rope_layers", "[a]"], None, "is not a list [a, b] with each entry an integer, or null."),
    (["--model.preset", "llama-8b"], None, "model.preset = llama-8b is not a known preset."),
    (
        ["--model.preset", "llama-25m"],
        None,
        "model.preset = llama-25m is a configuration, not a shape. Pass it as --config llama-25m",
    ),
    (
        ["--model.from_hf", "gone"],
        None,
        "model.from_hf = gone: gone/config.json could not be read: No such file or directory.",
    ),
    (["--tp", "3"], None, "parallel.tp = 3 does not divide model.num_attention_heads = 4"),
    (
        ["--tp", "2"],
        None,
        "parallel.tp = 2 makes tp * pp * cp = 2 * 1 * 1 = 2, which exceeds the run's 1 process. Start 2 processes",
    ),
]


@pytest.mark.parametrize("argv, text, says", MESSAGES)
def test_a_wrong_configuration_ends_with_status_2_and_one_message(capsys, argv, text, says):
    assert says in refusal(capsys, *argv, text=text)


UNLIKE = [
    (["--train.precision", "fp8"], "is not one of auto, fp32, bf16, fp16, fp64."),
    (["--train.precision", "BF16"], "Nearest: bf16."),
    (["--parallel.schedule", "inter"], "Nearest: interleaved."),
    (["--json", "x"], "--json on the command line is not a known option. See megalite train --help."),
    (["--checkpoint.every", "3"], "The option is called --checkpoint.interval."),
    (["--profiling.trace", "true"], "The option is called --profiling.ranks."),
    (["--run.directory", "x"], "Nearest: --run.dir."),
    (["--train.warmup_step", "x"], "Nearest: --optimizer.warmup_steps."),
    (["--train.qqq", "1"], "--train.qqq on the command line is not a known option. See megalite train --help train."),
    (["--config", "nothere"], "a configuration shipped with megalite. megalite train --list_configs lists those."),
    (["--model.preset", "flux"], "nemotron-h-56b, falcon-h1-0.5b."),
]


@pytest.mark.parametrize("argv, ends", UNLIKE)
def test_only_a_similar_name_is_suggested(capsys, argv, ends):
    """Whatever the case of its letters, or its beginning alone."""
    assert refusal(capsys, *argv).endswith(ends)


def mistakes(capsys, *argv: str, text: str | None = None) -> list[str]:
    """The mistakes that the one message lists."""
    with pytest.raises(SystemExit) as end:
        load(*argv, text=text)
    captured = capsys.readouterr()
    head, *listed = captured.err.splitlines()
    assert end.value.code == 2 and captured.out == "" and head == f"There are {len(listed)} mistakes:"
    return [line.removeprefix("- ") for line in listed]


def test_every_mistake_of_files_and_command_line_is_in_one_message(capsys):
    text = (
        "modle: {hidden_size: 2}\nmodel: {hiden_size: 2, hidden_size: wide}\ntrain: {steps: many, tokens: "
        "3}\noptimizer: 3"
    )
    words = [
        "quickstart",
        "--lr_min",
        "1",
        "--tp",
        "two",
        "--config",
        "gone.yaml",
        "--model.preset",
        "tini",
        "--train.compile",
    ]
    Path("gone").touch()
    lines = [
        line.split(" is not ")[0].split(" on the ")[0].split(" cannot")[0]
        for line in mistakes(capsys, *words, text=text)
    ]
    assert lines == [
        *("quickstart", "--lr_min", "--train.compile"),
        *("modle in run.yaml", "model.hiden_size in run.yaml", "optimizer = 3 in run.yaml"),
        *("train.steps = many in run.yaml", "model.hidden_size = wide in run.yaml", "--config = gone.yaml"),
        *("parallel.tp = two", "model.preset = tini"),
    ]


def test_every_broken_rule_is_in_one_message_and_one_cause_has_one_line(capsys):
    """tp does not divide the heads: neither the world nor the batch, which it decides, is blamed as well."""
    text = (
        "optimizer: {lr: 1e-3, min_lr: 1e-2, warmup_steps: 500}\ntrain: {steps: 100, grad_dtype: bf16}\nprofiling: "
        "{ranks: [7]}"
    )
    lines = mistakes(capsys, "--tp", "3", "--train.global_batch_size", "33", text=text)
    assert [line.split(" = ")[0] for line in lines] == [
        *("parallel.tp", "train.grad_dtype", "optimizer.min_lr", "optimizer.warmup_steps", "profiling.ranks"),
    ]
    lines = mistakes(
        capsys, "--model.hidden_size", "0", "--train.steps", "0", "--optimizer.warmup_steps", "5", "--tp", "0"
    )
    assert [line.split(" = ")[0] for line in lines] == ["model.hidden_size", "parallel.tp", "train.steps"]


def test_print_config_reads_back_to_the_same_configuration(capsys):
    argv = ("--model.preset", "llama-3.2-1b", "--tp", "2", "--optimizer.eps", "1e-9", "--data.validation", "0.05")
    config = load(*argv, world_size=4)
    with pytest.raises(SystemExit) as end:
        load(*argv, "--print_config", world_size=4)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert load(text=printed, world_size=4) == config
    assert yaml.safe_load(printed)["model"]["hidden_size"] == 2048 and yaml.safe_load(printed)["parallel"]["dp"] == 2


def test_dictionaries_round_trip():
    config = load("--model.preset", "llama-3.2-1b", "--data.train", "{tokens: 1.5}")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert from_dict({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(ConfigError, match="model.hiden_size .* Nearest: model.hidden_size"):
        from_dict({"model": {"hiden_size": 3}})


def test_help_shows_every_field_with_a_docstring(capsys):
    with pytest.raises(SystemExit) as end:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    docs = help_page.field_docs()
    for option in OPTIONS:
        assert f"--{option} " in text or f"--{option}," in text, option
        assert len(docs.get(option, "")) > 10, f"{option} has no docstring"
        assert " ".join(docs[option].split()) in text


def test_other_local_ranks_say_nothing_and_let_rank_0_speak_first(capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(SystemExit) as end:
        load("--tp", "3")
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == captured.err == "" and waited == [5.0]


def test_loading_needs_no_torch_and_using_a_configuration_no_parser():
    code = (
        "import sys, megalite.families.model_config; from megalite.config.load import from_dict, load_config; "
        "from_dict({});"
        "print([m for m in ('torch', 'jsonargparse', 'yaml', 'transformers') if m in sys.modules]);"
        "load_config(['--data.train', 'tokens'], world_size=1);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    env = {"PYTHONPATH": str(Path(loading.__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert ended.stdout == "[]\n[]\n"


# --- configurations that come with megalite


def test_a_name_is_a_shipped_configuration_where_no_file_has_it(capsys):
    with pytest.raises(SystemExit) as end:
        load_config(["--list_configs"], world_size=1)
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (
        end.value.code == 0
        and {"quickstart", "llama-3-8b"} <= set(listed)
        and all(what.endswith(".") for what in listed.values())
    )
    assert listed["llama-3-8b-128k"].endswith("DP8 = 64."), (
        "whole sentences, over several lines of the comment or a part of one"
    )
    assert load("--config", "shakespeare-char").run.name == "shakespeare-char"
    Path("shakespeare-char").write_text("run: {name: mine}")
    assert load("--config", "shakespeare-char").run.name == "mine"


def test_an_unknown_name_gets_the_nearest_shipped_one(capsys):
    with pytest.raises(SystemExit) as end:
        load("--config", "quickstrt")
    message = "--config = quickstrt is neither a file nor a configuration shipped with megalite. Nearest: quickstart.\n"
    assert end.value.code == 2 and capsys.readouterr().err == message


@pytest.mark.parametrize(
    "config, says",
    [
        ({"model": {"vocab_size": 32768}}, ["the data uses 1,024 of 32,768 ids (model.vocab_size)"]),
        ({"model": {"vocab_size": 2048}}, []),
        ({"data": {"validation": 0.1}}, ["set validation.interval"]),
        ({"data": {"validation": 0.1}, "validation": {"interval": 10}}, []),
    ],
)
def test_what_a_run_leaves_unused_is_named(tmp_path, config, says):
    (tmp_path / "tokens.json").write_text('{"vocab_size": 1024}')
    data = {"train": str(tmp_path / "tokens"), **config.get("data", {})}
    lines = unused(from_dict({**config, "data": data}))
    assert len(lines) == len(says) and all(text in line for text, line in zip(says, lines, strict=True))
