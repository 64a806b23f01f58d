"""A mixture of experts trains the same on every layout as on one process: weights, losses, gradient norms, and what its
routers learn.

fp64, 3 steps, within 1e-9. The model has a dense layer, a shared expert, both auxiliary losses and tokens that do not
count.
"""

from __future__ import annotations

import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.config.dims import ParallelDims
from megalite.config.load import from_dict
from megalite.planner.cost import expert_exchange
from megalite.planner.time.traffic import traffic
from megalite.training.trainer import Trainer
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, resharding
from tests.support.configs import write_tokens
from tests.support.jobs_experts import configs, exchanged, sent, train_recorded
from tests.support.spaces.experts import SPACE
from tests.support.spaces.space import world

STEPS = 3
FEWER = 2
PIPELINED = {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "zb-h1", "dispatch": "all_gather"}
SHARDED = {"tp": 2, "dp": 2, "ep": 2, "zero": 3}
LATENT = {"moe_latent_size": 20, "gated_mlp": False, "hidden_act": "relu2"}
BESIDE = {"parallel_block": "shared_norm", "mixture_out_multiplier": 0.5, "norm_topk_min": 0.7}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("case", SPACE.table(), ids=SPACE.label)
def test_trains_like_one_process(case, ranks, references, prefix):
    several, one = SPACE.configs(case, prefix)
    got = ranks.run(world(SPACE.complete(case)), jobs.train, several, STEPS)
    expected = references.run(jobs.train, one, STEPS)
    assert_same_run(got, expected, 1e-9, 1e-9)
    assert [result["dropped"] for result in got] == [expected["dropped"]] * len(got)
    assert all(expected["dropped"]) == (case["capacity"] is not None)


@pytest.mark.parametrize(
    "layout, model",
    [
        (SHARDED, LATENT),
        (PIPELINED, LATENT),
        (SHARDED | {"recompute": "operations"}, BESIDE),
        ({"cp": 2, "context": "ring", "dp": 2, "ep": 4, "recompute": "full"}, BESIDE),
    ],
    ids=str,
)
def test_experts_on_a_latent_or_beside_attention_train_like_one_process(layout, model, ranks, references, prefix):
    several, one = configs(prefix, **layout, model=model)
    got = ranks.run(4, jobs.train, several, FEWER)
    assert_same_run(got, references.run(jobs.train, one, FEWER), 1e-9, 1e-9)


@pytest.mark.parametrize("layout", [SHARDED | {"recompute": "full"}, PIPELINED], ids=str)
def test_adapters_of_experts_train_like_one_process(layout, ranks, references, prefix):
    several, one = configs(prefix, **layout)
    for config in (several, one):
        config["lora"] = {
            "rank": 3,
            "targets": ["q", "gate", "experts.in", "experts.down"],
            "ranks": {"experts.down": 2},
        }
    got = ranks.run(4, jobs.train, several, FEWER)
    expected = references.run(jobs.train, one, FEWER)
    assert_same_run(got, expected, 1e-9, 1e-9)
    start, *_ = ranks.run(1, jobs.train, one, 1)
    name = "weight/layers.0.mlp.experts.in.lora_b"
    assert expected["tensors"][name].shape[1] == 3 and not torch.equal(
        expected["tensors"][name], start["tensors"][name]
    )


def test_a_checkpoint_of_experts_goes_on_at_another_layout(ranks, prefix, tmp_path):
    """Saved at ep 4, loaded at ep 2 × tp 2: the same tensors bit for bit, then the same losses; at the same layout all
    bits."""
    saved = {"dp": 4, "ep": 4, "zero": 1, "balance": "bias", "microbatches": 2}
    loaded = {"dp": 2, "tp": 2, "ep": 2, "zero": 3, "balance": "bias", "microbatches": 4}

    def run(layout, load: str, name: str):
        config, _ = configs(prefix, **layout)
        config["train"] |= {
            "global_batch_size": 16,
            "micro_batch_size": 16 // (layout["dp"] * layout["microbatches"]),
            "steps": 4,
        }
        config |= {"run": {"dir": str(tmp_path), "name": name}, "checkpoint": {"load": load}}
        return ranks.run(4, resharding.train, config, 4)[0]

    straight = run(saved, "none", "straight")
    for layout, name in ((saved, "again"), (loaded, "elsewhere")):
        resumed = run(layout, straight["directory"], name)
        expected_tensors = straight["tensors"]
        assert resumed["tensors"].keys() == expected_tensors.keys()
        assert not [key for key, value in resumed["tensors"].items() if not torch.equal(value, expected_tensors[key])]
        expected = straight["losses"][resharding.SAVED_AFTER :]
        assert resumed["losses"] == (expected if layout is saved else pytest.approx(expected, rel=1e-9, abs=0))


def test_single_precision_differs_by_rounding_and_by_choices_between_equals(ranks, prefix):
    """With the choices of one process: 1e-5. A choice that would have been another one is between experts whose scores
    in this run are no further apart than twice the largest difference of the token's scores between the runs."""
    several, one = configs(prefix, tp=2, ep=2, zero=1, precision="fp32")
    one["train"]["precision"] = "fp32"
    (expected,) = ranks.run(1, train_recorded, one, FEWER)
    got = ranks.run(2, train_recorded, several, FEWER, expected["scores"])
    assert_same_run(got, expected, 1e-5, 2e-5)
    keys, theirs = expected["scores"]
    scores_by_token = {key: scores for each in got for key, scores in zip(*each["scores"], strict=True)}
    assert scores_by_token.keys() == set(keys)
    ours = torch.stack([scores_by_token[key] for key in keys])
    order = theirs.sort(descending=True, stable=True).indices
    chosen, others = ours.gather(1, order[:, :2]).amin(1), ours.gather(1, order[:, 2:]).amax(1)
    differences = (ours - theirs).abs().amax(1)
    assert (others - chosen <= 2 * differences).all() and 0 < differences.max() < 1e-4


def test_a_run_starts_with_the_biases_of_its_initial_weights(prefix, tmp_path):
    _, config = configs(prefix, balance="bias")
    config["run"] = {"dir": str(tmp_path), "name": "first"}

    def biases(steps: int) -> tuple[torch.Tensor, str]:
        parsed = from_dict(config)
        trainer = Trainer(parsed, make_mesh(parsed))
        for _ in range(steps):
            trainer.step()
        states = {state.name: state.tensor for state in trainer.parts.statistics.rectangles()}
        bias, directory = states["router/bias"].clone(), str(trainer.save())
        trainer.close()
        return bias, directory

    trained, directory = biases(2)
    config["model"] |= {"init_from": directory}
    config["run"] |= {"name": "second"}
    assert trained.any() and torch.equal(biases(0)[0], trained)


def test_an_exchange_of_uneven_sizes_and_its_gradient(ranks, prefix):
    """Ranks without rows for each other, and one that gets none at all."""
    sizes = [[2, 0, 1, 0], [0, 3, 0, 0], [4, 1, 0, 0], [0, 0, 5, 0]]
    config, _ = configs(prefix, dp=4, ep=4)
    for rank, result in enumerate(ranks.run(4, exchanged, config, sizes)):
        starts = [sum(row[:rank]) for row in sizes]
        assert result["out"] == [
            100 * source + starts[source] + i for source, row in enumerate(sizes) for i in range(row[rank])
        ]
        assert result["grad"] == [float(target + 1) for target, count in enumerate(sizes[rank]) for _ in range(count)]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_sends_the_planned_bytes(recompute, ranks, prefix):
    """Every token chooses every expert: the load is equal, which the plan assumes. The plan also has the counts, which
    are gathered."""
    config, _ = configs(prefix, dp=4, ep=4, recompute=recompute, model={"num_experts_per_tok": 4})
    parsed = from_dict(config)
    layers = sum(map(parsed.model.is_mixture, range(parsed.model.num_hidden_layers)))
    counts = ParallelDims.of(parsed).microbatches * layers * 3 * 4 * expert_exchange.COUNT
    planned = traffic(parsed, 4)[0].ep
    assert ranks.run(4, sent, config) == [planned - counts] * 4
