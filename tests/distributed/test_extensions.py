"""What files of the user add: the manual's own file trains on two layouts as on one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.commands.train import check_run
from megalite.config.errors import ConfigError
from megalite.config.extensions import EXTENSIONS, is_source, load_extensions, observer
from megalite.config.load import from_dict, load_config
from megalite.config.rules import check
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import build
from megalite.data.loader import Loader
from megalite.mesh.layout import AxisPlace
from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import Observer, numbers_of
from megalite.objectives.find import objective_class
from megalite.training.objective_trial import try_objective
from tests.structure.sources import ROOT
from tests.support.jobs_objectives import observe, train_and_validate
from tests.support.preferences import VOCAB, write_preferences

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (text,) = re.findall(
        r'^```python title="my_extensions.py"\n(.*?)^```',
        (ROOT / "docs" / "extensions.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    path = tmp_path_factory.mktemp("own") / "my_extensions.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _unregistered():
    """Each test starts without extensions in this process."""
    yield
    for table in (EXTENSIONS.files, EXTENSIONS.objectives, EXTENSIONS.sources, EXTENSIONS.observers):
        table.clear()


def configuration(file: Path, data: str, objective: str = "cross_entropy", **parallel: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(file.parent), "extensions": [str(file)]},
        "model": MODEL | {"vocab_size": VOCAB},
        "parallel": {"dp": 1, **parallel},
        "data": {"train": data, "validation": data, "sequence_length": 28},
        "train": {
            **{"steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "precision": "fp64", "objective": objective},
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "checkpoint": {"load": "none"},
        "validation": {"batches": 2},
    }


@pytest.mark.parametrize("objective", ["cross_entropy", "squared_hinge"])
def test_trains_like_one_process(objective, file, ranks, references, tmp_path):
    lengths = [(2, 3, 4), (3, 5, 2), (1, 4, 4), (2, 2, 6), (4, 3, 3)] * 2
    data = f"counting:{VOCAB}" if objective == "cross_entropy" else write_preferences(tmp_path / "x", lengths)
    expected = references.run(train_and_validate, configuration(file, data, objective), 3)
    got = ranks.run(4, train_and_validate, configuration(file, data, objective, tp=2, pp=2), 3)
    for rank in got:
        for key in ("losses", "grad_norms", "validation"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-9), key
    for name, value in expected["tensors"].items():
        torch.testing.assert_close(got[0]["tensors"][name], value, rtol=0, atol=1e-9, msg=name)
    assert expected["losses"][0] != pytest.approx(expected["losses"][-1], rel=1e-4), "it trains"


def test_an_observer_is_called_on_every_rank(file, ranks):
    """Its numbers and lines are those of rank 0."""
    first, second = ranks.run(2, observe, configuration(file, f"counting:{VOCAB}", dp=2) | {}, 10)
    assert first == {"tokens_so_far": [112 * step for step in range(1, 11)], "lines": ["1,120 tokens on 2 ranks"]}
    assert second == {"tokens_so_far": [], "lines": []}


def test_rows_of_a_source(file):
    load_extensions([str(file)])
    config = DataConfig(train="counting:7", validation="counting:5", sequence_length=6)
    data, validation = build(config, seed=1)
    assert (data.samples_per_epoch, data.vocab_size) == (49, 7) and validation is not None
    assert validation[8].tokens.tolist() == [1, 4, 2, 0, 3, 1] and validation[8].targets[-1] == 4, "in order"
    rows = [tuple(data[index].tokens) for index in range(98)]
    assert len({*rows[:49]}) == len({*rows[49:]}) > 40 and rows[:49] != rows[49:], "shuffled in each epoch"
    again, _ = build(config, seed=1)
    other, _ = build(DataConfig(train="counting:8", sequence_length=6), seed=1)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert not is_source("data/book") and is_source("counting:7")


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_id_outside_the_vocabulary_is_named_by_its_row(shuffle, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from megalite.config.extensions import DataSource, data_source\n"
        "@data_source('one')\nclass One(DataSource):\n"
        "    def __len__(self): return 8\n"
        "    def row(self, index): return [9 if index == 5 else 1] * (self.sequence_length + 1)\n"
    )
    load_extensions([str(path)])
    data, _ = build(DataConfig(train="one:x", sequence_length=6, shuffle=shuffle), 0)
    loader = Loader(data, global_batch_size=8, micro_batch_size=2, dp=AxisPlace(0, 1), vocab_size=9)
    with pytest.raises(ConfigError, match="^row 5 of one:x contains token id 9, .*Correct One.row"):
        loader.step(0)
    loader.close()


def test_a_configuration_names_what_a_file_registers(file, tmp_path):
    words = ["--config", "quickstart", "--run.extensions", f"[{file}]", "--run.dir", str(tmp_path)]
    config = load_config([*words, "--data.train", "counting:97", "--train.epochs", "1"], world_size=1)
    assert (config.model.vocab_size, config.run.extensions) == (97, [str(file)])
    held_out = -(-(97**2) // 100)
    assert config.train.steps == -(-(97**2 - held_out) // config.train.global_batch_size)
    train, validation = build(config.data, 0)
    assert validation is not None
    assert (train.samples_per_epoch, validation.samples_per_epoch) == (97**2 - held_out, held_out)
    assert validation[held_out - 1].tokens[:3].tolist() == [96, 95, 94], "the last row"


@pytest.mark.parametrize(
    "option, value", [("beta", 0.2), ("nll_weight", 0.1), ("gamma", 0.1), ("desirable_weight", 0.5)]
)
def test_a_registered_objective_may_read_every_option(option, value, file, tmp_path):
    data = write_preferences(tmp_path / "x", [(2, 3, 4)])
    load_extensions([str(file)])
    for objective in ("squared_hinge", f"{file}:SquaredHingeOfMeans"):
        check(from_dict(configuration(file, data, objective) | {"preference": {option: value}}), 1)


def test_a_source_has_no_preferences(file):
    load_extensions([str(file)])
    with pytest.raises(ConfigError, match=r"squared_hinge needs other data than counting:61.*Use token files of"):
        check(from_dict(configuration(file, f"counting:{VOCAB}", "squared_hinge")), 1)


@pytest.mark.parametrize(
    "attributes, said",
    [
        ("data, reads = 'labelled', 'rewards'", "reads rewards, which only pairs without"),
        ("reads = 'reward'", "reads is 'reward'"),
    ],
)
def test_bad_objectives_of_rewards(attributes, said, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from megalite.objectives.objective import PairObjective\n"
        f"class Own(PairObjective):\n    {attributes}\n    def losses(self, chosen, rejected): return chosen.reward\n"
    )
    with pytest.raises(ConfigError, match=said):
        objective_class(f"{path}:Own")


PAIR = "from megalite.objectives.objective import Objective, PairObjective\nclass Own(PairObjective):\n"
MISTAKES = {
    "a mean": (f"{PAIR}    def losses(self, chosen, rejected): return chosen.mean.mean()\n", "not their sum or mean"),
    "no reference": (
        f"{PAIR}    def losses(self, chosen, rejected): return rejected.log_ratio - chosen.log_ratio\n",
        "Set needs_reference = True in Own",
    ),
    "detached": (f"{PAIR}    def losses(self, chosen, rejected): return chosen.mean.detach()\n", "has no gradient"),
    "another error": (
        f"{PAIR}    def losses(self, chosen, rejected):\n        return chosen.means\n",
        "AttributeError: .* line 4",
    ),
    "a mean of terms": (
        f"{PAIR.replace('(PairObjective)', '(Objective)')}    data = 'pairs'\n"
        "    def terms(self, scores): return [scores.completion.mean()]\n"
        "    def counts(self, scores): return [scores.completion_tokens.sum()]\n",
        "not means: term 0 is the same",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_objective_is_one_message_before_ranks_start(mistake, tmp_path, capsys):
    path, (text, said) = tmp_path / "own.py", MISTAKES[mistake]
    path.write_text(text)
    pairs = write_preferences(tmp_path / "x", [(2, 3, 4)] * 8)
    tree = configuration(path, pairs, f"{path}:Own")
    tree["run"]["extensions"] = None
    with pytest.raises(SystemExit):
        check_run(from_dict(tree))
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "cpo", "orpo", "kto", "reward"])
def test_objectives_of_megalite_pass_the_trial_of_own_ones(name, tmp_path):
    path, kind = tmp_path / "own.py", objective_class(name)
    path.write_text(f"from {kind.__module__} import {kind.__name__}\nclass Own({kind.__name__}): pass\n")
    try_objective(from_dict({"train": {"objective": f"{path}:Own"}}))


@pytest.mark.parametrize("name", ["loss", "mfu", "kl", "val_loss", "time_total"])
def test_an_observer_does_not_replace_a_number(name):
    class Own(Observer):
        def numbers(self, metrics):
            return {name: 0.5}

    observer(Own)
    step = StepMetrics(1, 2.0, 1.0, 0.1, 10, 1.0, 10.0, 1.0, None, None, 0, 1.0, False)
    if name == "time_total":
        assert numbers_of([Own()], step, {"kl": 1.0}) == {"kl": 1.0, name: 0.5}
        return
    with pytest.raises(ConfigError, match=f"Own.numbers of run.extensions returns {name}"):
        numbers_of([Own()], step, {"kl": 1.0})


def test_the_line_of_a_mistake_in_a_relative_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("import math\n\nmath.squareroot(2)\n")
    with pytest.raises(ConfigError, match="bad.py line 3 cannot be imported"):
        load_extensions(["bad.py"])


BAD = {
    "missing": (None, "there is no file"),
    "broken": ("import math\n\nmath.squareroot(2)\n", "bad.py line 3 cannot be imported (AttributeError: "),
    "empty": ("x = 1\n", "registers nothing. Put @objective"),
    "twice": (
        "from megalite.config.extensions import data_source\n"
        "for _ in range(2):\n    @data_source('a')\n    class A: pass\n",
        "line 3 cannot be imported (there are two of the data source a",
    ),
    "built in": (
        "from megalite.config.extensions import objective\n@objective('dpo')\nclass A: pass\n",
        "cannot be imported (dpo is the name of an objective of megalite",
    ),
    "format of streams": (
        "from megalite.config.extensions import data_source\n@data_source('jsonl')\nclass A: pass\n",
        "cannot be imported (jsonl is the name of a data source of megalite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case, tmp_path):
    text, message = BAD[case]
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_extensions([str(path)])
    assert f"run.extensions = {path}" in str(error.value) and message in str(error.value)


def test_bad_sources_and_objectives(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "from megalite.config.extensions import DataSource, data_source, objective\n"
        "@data_source('short')\nclass Short(DataSource):\n"
        "    def __len__(self): return int(self.argument)\n"
        "    def row(self, index): return [1.5, 2]\n"
        "@objective('nothing')\nclass Nothing: pass\n"
    )
    load_extensions([str(path)])
    with pytest.raises(ConfigError, match=r"short:x cannot be made \(ValueError: .*Correct Short or the text after"):
        build(DataConfig(train="short:x", sequence_length=6), 0)
    with pytest.raises(ConfigError, match=r"short:0 has no rows"):
        build(DataConfig(train="short:0", sequence_length=6), 0)
    data, _ = build(DataConfig(train="short:3", sequence_length=6), 0)
    with pytest.raises(ConfigError, match=r"row \d of short:3 has shape \[2\] and type float64. Short.row must"):
        data[0]
    with pytest.raises(ConfigError, match="run.extensions .registered: short.. Nearest: short"):
        check(from_dict({"data": {"train": "shor:3"}}), 1)
    tree = {"data": {"train": "short:3", "reset_positions": True}, "run": {"extensions": [str(path)]}}
    for changed, said in (
        ({}, "data.reset_positions = true"),
        ({"reset_positions": False}, "short:3 does not have it"),
    ):
        facts = from_dict(tree | {"data": tree["data"] | changed})
        with pytest.raises(ConfigError, match=said):
            check(facts, 1)
    with pytest.raises(ConfigError, match="nothing: Nothing is not a class that is derived from Objective"):
        objective_class("nothing")
    with pytest.raises(ConfigError, match="nothin is unknown.*run.extensions registers.*Nearest: nothing"):
        objective_class("nothin")
