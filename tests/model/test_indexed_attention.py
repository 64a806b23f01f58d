"""Attention to selected rows: dense where rows are short, and the loss of the indexer against its definition."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.config.load import from_dict
from megalite.mesh.mesh import MeshAxis
from megalite.model.blocks.indexed_attention import loss
from megalite.model.blocks.indexed_attention.loss import STATISTIC
from megalite.model.kinds import stage_starts
from megalite.model.queries import WithQueries, count_queries
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch, Queries
from tests.support import jobs, jobs_indexed
from tests.support.configs import write_tokens
from tests.support.jobs_experts import BALANCE, MIXTURE
from tests.support.jobs_indexed import INDEXED, configs
from tests.support.jobs_training import train_and_save, train_with_initial_weights
from tests.support.pool import RankContext

ALONE = RankContext(0, 1)
SEQUENCE, BATCH = 16, 2
NO_LOSS = {"index_loss_coef": 0.0}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def test_rows_that_all_fit_are_dense_latent_attention_bitwise(prefix):
    """With and without the indexer's loss, which reaches nothing but the indexer; in the warm-up, too."""
    dense = {"index_topk": None, "index_n_heads": 64, "index_head_dim": 128, "index_loss_coef": 0.0}

    def train(model: dict[str, Any]) -> dict[str, Any]:
        _, config = configs(prefix, model=model, train={"grad_clip": 0.0})
        return jobs.train(ALONE, config, 3)

    expected = train(dense)
    for coefficient in (0.0, 0.7):
        got = train({"index_topk": SEQUENCE, "index_loss_coef": coefficient})
        assert got["losses"] == expected["losses"]
        for name, value in expected["tensors"].items():
            assert torch.equal(got["tensors"][name], value), name
    _, config = configs(prefix, train={"grad_clip": 0.0, "indexer": "warmup"})
    warm = train_with_initial_weights(ALONE, config, 3)
    assert warm["losses"][0] == expected["losses"][0]
    for name, value in warm["before"].items():
        assert torch.equal(warm["tensors"][name], value) == ("indexer" not in name), name


def test_a_warm_up_gives_indexers_to_a_dense_model(prefix, tmp_path):
    place = {"run": {"dir": str(tmp_path)}, "checkpoint": {"load": "none"}}
    _, dense = configs(prefix, model={"index_topk": None, "index_n_heads": 64, "index_head_dim": 128} | NO_LOSS)
    dense |= {name: dense.get(name, {}) | options for name, options in place.items()}
    saved = train_and_save(ALONE, dense, 2, 0)
    _, config = configs(prefix, model={"init_from": saved["directory"]}, train={"indexer": "warmup"})
    warm = train_with_initial_weights(ALONE, config, 1)
    for name, value in warm["tensors"].items():
        start = warm["before"][name]
        assert torch.equal(start, value) == ("indexer" not in name), name
        assert "indexer" in name or torch.equal(start, saved["tensors"][name]), name
    _, config = configs(prefix, model={"init_from": saved["directory"]})
    with pytest.raises(CheckpointError, match="indexer"):
        jobs.make_trainer(ALONE, config)


def test_a_warm_up_leaves_the_biases_of_routers(prefix):
    _, config = configs(prefix, model=MIXTURE | BALANCE["bias"], train={"indexer": "warmup"})
    trainer = jobs.make_trainer(ALONE, config)
    try:
        metrics = trainer.step().of_model
        assert metrics["expert_load_peak"] > 1 and metrics["router_bias_range"] == 0
    finally:
        trainer.close()


def definition(
    weights: dict[str, Tensor], x: Tensor, latent: Tensor, tables: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """Scores I of all rows in fp64, [batch, queries, rows]; one layer, whole rows, halves rotate."""
    heads, dim, rotating = INDEXED["index_n_heads"], INDEXED["index_head_dim"], INDEXED["qk_rope_head_dim"]

    def rotated(y: Tensor) -> Tensor:  # [seq, batch, heads, dim]
        turned, (cos, sin) = y[..., :rotating], tables
        half = torch.cat((-turned[..., rotating // 2 :], turned[..., : rotating // 2]), -1)
        return torch.cat((turned * cos + half * sin, y[..., rotating:]), -1)

    q = rotated((latent @ weights["q.weight"].T).unflatten(-1, (heads, dim)))
    keys = torch.nn.functional.layer_norm(
        x @ weights["k.weight"].T, (dim,), weights["k_norm.weight"], weights["k_norm.bias"], 1e-6
    )
    products = torch.einsum("sbhd,tbd->bsth", q, rotated(keys.unsqueeze(2)).squeeze(2)) * dim**-0.5
    gates = (x @ weights["weights.weight"].T * heads**-0.5).transpose(0, 1).unsqueeze(2)
    return (products.relu() * gates).sum(-1).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("phase", ["sparse", "warmup"])
def test_loss_and_gradients_are_those_of_the_definition(phase, prefix):
    """Two documents in a row, ignored targets that count and padding that does not; fp64, within 1e-12."""
    _, config = configs(prefix, train={"indexer": phase}, model={"num_hidden_layers": 1})
    trainer = jobs.make_trainer(ALONE, config)
    try:
        store, stage = trainer.store, trainer.parts.stages[0]
        torch.manual_seed(0)
        store.reducer.begin_step(1, 1.0)
        counted = torch.ones(SEQUENCE, BATCH, dtype=torch.bool)
        counted[-3:, 1] = False
        starts = torch.zeros(SEQUENCE, BATCH, dtype=torch.int64)
        starts[6:, 0], starts[-3:, 1] = 6, SEQUENCE - 3
        tokens = torch.randint(96, (SEQUENCE, BATCH))
        targets = torch.randint(96, (SEQUENCE, BATCH))
        targets[::3] = IGNORE_INDEX
        microbatch = Microbatch.of(tokens, targets, torch.arange(BATCH), starts, queries=Queries(counted, factor=0.75))
        block = stage.blocks("indexed_attention")[0]
        seen: dict[str, Any] = {}
        project = block.project_with_latent

        def watched(x: Tensor, state: Any) -> Any:
            out = project(x, state)
            seen.update(x=x.detach(), q=out[0].detach(), k=out[1].detach(), latent=out[3].detach())
            seen["tables"] = block.rotary_tables(state)
            return out

        block.project_with_latent = watched
        state = stage.forward_state(microbatch, 1, True)
        out, statistics = stage(tokens, microbatch, state, 0.01)
        out.backward()
        prefix_of = "layers.0.attention.indexer."
        own = {
            name.removeprefix(prefix_of): weight for name, weight in store.weights.items() if name.startswith(prefix_of)
        }
        weights = {name: weight.tensor.detach().clone().requires_grad_() for name, weight in own.items()}
        row = torch.arange(SEQUENCE)
        visible = (row <= row[:, None]) & (row >= starts.T[:, :, None])  # [batch, queries, rows]
        cos, sin = seen["tables"]
        half = cos.shape[-1] // 2
        tables = cos.double(), torch.cat((-sin[..., :half], sin[..., half:]), -1).double()
        scores = definition(weights, seen["x"], seen["latent"], tables, visible)
        if phase == "sparse":
            chosen = scores.detach().topk(INDEXED["index_topk"]).indices
            visible = visible & torch.zeros_like(visible).scatter(-1, chosen, True)
        attention = torch.einsum("sbhd,tbhd->bsht", seen["q"], seen["k"]) * block.scale
        attention = attention.masked_fill(~visible.unsqueeze(2), -torch.inf).softmax(-1)
        p = attention.sum(2) / attention.sum((2, 3)).unsqueeze(-1)
        log_q = scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0)
        kl = (torch.xlogy(p, p) - p * log_q).sum(-1) * counted.T
        (kl.sum() * (0.7 * 0.01 * 0.75)).backward()
        total, queries = statistics[STATISTIC][0].tolist()
        assert total == pytest.approx(kl.sum().item(), rel=1e-12) and queries == counted.sum()
        for name, weight in own.items():
            expected = weights[name].grad
            assert weight.grad is not None and expected is not None
            assert (weight.grad - expected).abs().max() <= 1e-12 * expected.abs().max(), name
    finally:
        trainer.close()


def test_a_shared_layer_takes_the_selection_of_the_last_full_one(prefix):
    _, config = configs(prefix, model=jobs_indexed.SHARED)
    result = jobs_indexed.train(ALONE, config, 1)
    assert {layer for _, layer, _, _ in result["selections"]} == {0, 2, 3}
    assert not any(name.startswith("layers.1.attention.indexer") for name in result["tensors"])


def test_no_stage_begins_between_a_selection_and_a_layer_that_shares_it():
    """In a model with other blocks, too, which may begin one elsewhere."""
    model = {"num_hidden_layers": 6, "layer_blocks": ["indexed_attention+feed_forward", "mamba"] * 3, "index_topk": 4}
    types = ["full", "full", "shared", "full", "full", "full"]
    assert stage_starts(from_dict({"model": model | {"indexer_types": types}}).model) == [0, 3, 4, 5]


def test_validation_computes_no_loss_of_indexers(prefix):
    _, config = configs(prefix)
    config["data"]["validation"] = prefix
    config["validation"] = {"batches": 1, "interval": 1}
    trainer = jobs.make_trainer(ALONE, config)
    try:
        calls: list[str] = []
        compute = loss.indexer_loss

        def counted(*arguments: Any) -> Any:
            calls.append("loss")
            return compute(*arguments)

        with patch.object(loss, "indexer_loss", counted):
            trainer.evaluate()
            assert not calls
            trainer.step()
        assert len(calls) == config["model"]["num_hidden_layers"]
    finally:
        trainer.close()


def test_padding_after_conversations_is_no_query():
    """A conversation without targets is none; one row is full."""
    tokens = torch.tensor([[3, 4, 0, 5, 6, 0, 0], [3, 4, 0, 5, 6, 7, 0], [3, 4, 0, 5, 6, 0, 8]]).T
    starts = torch.tensor([[0, 0, 0, 3, 3, 5, 5], [0, 0, 0, 3, 3, 3, 6], [0, 0, 0, 3, 3, 5, 5]]).T
    targets = torch.where(starts == 3, tokens, IGNORE_INDEX)
    microbatch = WithQueries(Microbatch.of, padded=True)(tokens, targets, torch.arange(3), document_start=starts)
    assert microbatch.queries is not None
    assert microbatch.queries.counted.sum(0).tolist() == [5, 6, 7]
    count_queries([microbatch, microbatch], 12, MeshAxis("alone", 0, 1, (0,)))
    assert microbatch.queries.factor == 12 / 36
