"""The plan of a reference model: a copy of the start, or a second model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.families.model_config import hf_shape
from megalite.mesh.mesh import Mesh
from megalite.planner.hardware.devices import find_device
from megalite.planner.memory.estimate import estimate
from megalite.planner.report.explanation import illegal
from megalite.planner.search.best_first import Search
from megalite.planner.time.step import PlannedJob
from megalite.planner.time.traffic import traffic
from megalite.training import meta_device as meta
from megalite.training.start_copy import StartCopy
from megalite.training.teacher import ReferenceModel
from megalite.training.trainer import Trainer
from tests.planner.test_memory import MODEL, Sent, tree
from tests.support import jobs_memory
from tests.support.configs import write_tokens

BF16 = {"train": {"precision": "bf16"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "start, ZeRO-1": {"dp": 2},
    "start, bf16, ZeRO-3, pp 2": {"dp": 2, "zero": 3, "pp": 2, **BF16},
    "start, saved modules, tp 2": {"tp": 2, "lora": {"rank": 4, "modules_to_save": ["embedding"]}},
    "second, tp 2, split sequence": {"tp": 2, "sequence_parallel": True},
    "second, bf16, ZeRO-3, pp 2": {"dp": 2, "zero": 3, "pp": 2, **BF16},
    "quantized, ZeRO-3": {"dp": 2, "zero": 3},
}


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with another width and depth, as a Hugging Face directory."""
    place = tmp_path_factory.mktemp("second")
    LlamaForCausalLM(LlamaConfig(**MODEL | {"hidden_size": 48, "num_hidden_layers": 2})).save_pretrained(place)
    return f"hf:{place}"


@pytest.fixture(scope="module")
def quantized(second, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of adapters over that model in 4 bits."""
    config = tree(lora={"rank": 2, "base": "nf4"})
    place = tmp_path_factory.mktemp("quantized")
    config["run"] = {"dir": str(place), "name": "run"}
    config["data"]["train"] = write_tokens(place, MODEL["vocab_size"])
    config["model"] |= hf_shape(second.removeprefix("hf:")) | {"init_from": second}
    parsed = from_dict(config)
    trainer = Trainer(parsed, build.make_mesh(parsed))
    directory = trainer.save()
    trainer.close()
    return str(directory)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_reference_is_planned_to_the_byte(case, second, quantized, monkeypatch):
    """What rank 0 keeps of it, and what a step of KTO with both passes of the reference sends."""
    options = LAYOUTS[case]
    config = tree(**options | {"train": {"objective": "kto"} | options.get("train", {})})
    names = {"second": second, "quantized": quantized}
    config["preference"] = {"reference": names.get(case.partition(",")[0])}
    parsed = from_dict(config)
    world = build.layout(parsed).world
    with meta.fake_process(0, world), Sent() as sent:
        mesh = Mesh(build.layout(parsed), **build.mesh_options(parsed))
        monkeypatch.setattr(jobs_memory, "mesh_of", lambda context, config: mesh)
        stepping = jobs_memory.Stepping(None, config)
        sent.bytes = 0.0  # the initial weights were gathered
        stepping.step(1)
    reference = stepping.reference
    if isinstance(reference, StartCopy):
        kept = reference.kept_bytes
    else:
        assert isinstance(reference, ReferenceModel)
        buckets = reference.parts.store.buckets
        kept = sum((bucket.full if bucket.shard is None else bucket.shard).nbytes for bucket in buckets)
    assert estimate(parsed, world, "cpu")[0].teacher == kept > 0
    assert sum(traffic(parsed, world)[0].to_dict().values()) == pytest.approx(sent.bytes, rel=1e-9)


def test_layouts_that_a_second_model_does_not_fit_are_not_planned(second):
    """It has 2 layers and 4 heads, the model 8 and 8."""
    shape = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    base = from_dict(tree(model=MODEL | shape, train={"objective": "dpo"}) | {"preference": {"reference": second}})

    def search(**fixed: int) -> Search:
        return Search(PlannedJob.of(base, find_device("h100")), base, 8, fixed, wanted=3)

    cores = {(core.pp, core.tp) for core in search().cores()}
    assert (max(pp for pp, _ in cores), max(tp for _, tp in cores)) == (2, 4)
    assert len(search().plans()) == 3
    assert not search(pp=4).plans() and "preference.reference = " in illegal(search(pp=4))
