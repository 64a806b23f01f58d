"""Multi-token prediction on one process against its definition, written out in float64: losses, and the gradient of
every parameter.

Also what it predicts from (`model.mtp.targets`), how many parameters it has, and that validation does not know it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.data.indexed import IndexedTokens
from megalite.data.preparation.writer import IndexedWriter
from megalite.families.presets import preset
from megalite.model.mtp.targets import shifted
from megalite.model.parameters import active_parameters, model_specs
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.spec import parameter_count
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import EOS, write_tokens

SEQUENCE, BATCH, VOCAB, BETA, WEIGHT = 14, 4, 53, 0.9, 0.4
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODEL |= {"num_key_value_heads": 2, "max_position_embeddings": SEQUENCE, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), VOCAB, count=400)


def config_of(prefix: str, directory: Any, model: dict[str, Any], documents: bool = False, **train: Any) -> Config:
    sizes = {
        "steps": 1,
        "global_batch_size": BATCH,
        "micro_batch_size": 2,
        "precision": "fp64",
        "grad_clip": 0.0,
        "mtp_weight": WEIGHT,
    }
    return from_dict(
        {
            "run": {"dir": str(directory), "name": "run"},
            "model": MODEL | model,
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False, "validation": prefix}
            | {"reset_positions": documents, "eod_mask_loss": documents},
            "train": sizes | train,
            "optimizer": {"betas": [BETA, 0.95], "decay": "constant"},
            "checkpoint": {"load": "none"},
        }
    )


# ---- the definition


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def layer(x: Tensor, index: int, w: dict[str, Tensor], starts: Tensor) -> Tensor:
    """A Llama layer, x [rows, positions, hidden]: no token sees another document, in which positions begin at 0."""
    rows, length, hidden = x.shape
    heads, kv, at = MODEL["num_attention_heads"], MODEL["num_key_value_heads"], f"layers.{index}"
    size = hidden // heads
    index_of = torch.arange(length)
    # [rows, positions, size / 2]
    angles = (index_of - starts).double()[..., None] * 10000.0 ** -(torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)

    def project(part: str, number: int) -> Tensor:
        return (normed(x, w[f"{at}.input_norm.weight"]) @ w[f"{at}.attention.{part}.weight"].T).view(
            rows, length, number, size
        )

    def rotated(y: Tensor) -> Tensor:
        one, two = y.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    q, k, v = rotated(project("q", heads)), rotated(project("k", kv)), project("v", kv)
    k, v = (each.repeat_interleave(heads // kv, 2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * size**-0.5
    seen = (index_of[:, None] >= index_of) & (starts[:, :, None] == starts[:, None, :])
    probabilities = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
    x = x + torch.einsum("bhqk,bkhd->bqhd", probabilities, v).flatten(2) @ w[f"{at}.attention.out.weight"].T
    y = normed(x, w[f"{at}.mlp_norm.weight"])
    inner = torch.nn.functional.silu(y @ w[f"{at}.mlp.gate.weight"].T) * (y @ w[f"{at}.mlp.up.weight"].T)
    return x + inner @ w[f"{at}.mlp.down.weight"].T


def defined(w: dict[str, Tensor], model: ModelConfig, rows: Tensor, documents: bool) -> list[Tensor]:
    """The mean loss of the next token, and of each module, of rows [rows, positions + 1]."""
    tokens, length = rows[:, :-1], rows.shape[1] - 1
    starts = torch.zeros_like(tokens)
    for position in range(1, length if documents else 0):
        starts[:, position] = torch.where(tokens[:, position - 1] == EOS, position, starts[:, position - 1])
    table = w["embedding.weight"]
    x = table[tokens]
    for index in range(model.num_hidden_layers):
        x = layer(x, index, w, starts)
    hidden = normed(x, w["norm.weight"])
    losses = []
    for shift in range(model.mtp_layers + 1):
        if shift:
            index = model.num_hidden_layers + shift - 1
            following = torch.stack([tokens[:, min(position + shift, length - 1)] for position in range(length)], 1)
            part = f"layers.{index}.mtp"
            both = torch.cat(
                (normed(table[following], w[f"{part}.enorm.weight"]), normed(hidden, w[f"{part}.hnorm.weight"])), -1
            )
            hidden = normed(layer(both @ w[f"{part}.eh_proj.weight"].T, index, w, starts), w[f"{part}.norm.weight"])
        log_probabilities = (hidden @ w.get("head.weight", table).T).log_softmax(-1)
        counted = []
        for row in range(len(rows)):
            for position in range(length - shift):
                last = position + shift  # the last token that the prediction is made from
                if not documents or (starts[row, last] == starts[row, position] and tokens[row, last] != EOS):
                    counted.append(-log_probabilities[row, position, rows[row, last + 1]])
        losses.append(torch.stack(counted).mean())
    return losses


CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "a module": ({"mtp_layers": 1}, False, {}),
    "two modules, tied, documents": ({"mtp_layers": 2, "tie_word_embeddings": True}, True, {}),
    "documents, losses in chunks": ({"mtp_layers": 1}, True, {"loss_chunk": 8}),
    "two modules, everything recomputed": ({"mtp_layers": 2}, False, {"recompute": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_definition(name, prefix, tmp_path):
    """Ours are read from AdamW's first moment, which is (1 - beta) times the gradient after one step."""
    changes, documents, train = CASES[name]
    config = config_of(prefix, tmp_path, changes, documents, **train)
    trainer = Trainer(config, make_mesh(config))
    weights = {
        key.removeprefix("weight/"): value.requires_grad_()
        for key, value in global_tensors(trainer, ("weight",)).items()
    }
    result = trainer.step()
    moments = global_tensors(trainer, ("exp_avg",))
    trainer.close()
    flat = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    rows = torch.stack([flat[start : start + SEQUENCE + 1] for start in range(0, BATCH * SEQUENCE, SEQUENCE)])
    own, *ahead = defined(weights, config.model, rows, documents)
    assert result.loss == pytest.approx(own.item(), rel=1e-9)
    assert result.of_model["mtp_loss"] == pytest.approx(sum(ahead).item() / len(ahead), rel=1e-9)
    if len(ahead) > 1:
        assert result.of_model["mtp_losses"] == pytest.approx([each.item() for each in ahead], rel=1e-9)
    total = own + WEIGHT / len(ahead) * sum(ahead)
    expected = torch.autograd.grad(total, list(weights.values()))
    assert {f"exp_avg/{key}" for key in weights} == moments.keys()
    for (key, _), gradient in zip(weights.items(), expected, strict=True):
        assert gradient.abs().max() > 1e-6, f"{key} has no gradient"
        assert (moments[f"exp_avg/{key}"] / (1 - BETA) - gradient).abs().max() <= 1e-9, key


def test_validation_is_of_the_next_token_alone(prefix, tmp_path):
    """The same seed draws the same weights, modules or not."""
    losses = []
    for modules in (0, 2):
        config = config_of(prefix, tmp_path, {"mtp_layers": modules})
        trainer = Trainer(config, make_mesh(config))
        losses.append(trainer.evaluate())
        trainer.close()
    assert losses[0] == losses[1] > 1


@pytest.mark.parametrize("modules", [1, 2])
def test_a_step_whose_targets_are_all_ignored_has_a_loss_of_zero(modules, tmp_path):
    """As a batch of a chat may be, which has only prompts: here each token is a document."""
    with IndexedWriter(tmp_path / "ends", VOCAB) as writer:
        writer.add(np.full(200, EOS), [1] * 200)
        writer.finish({"vocab_size": VOCAB, "eos": EOS})
    config = config_of(str(tmp_path / "ends"), tmp_path, {"mtp_layers": modules}, documents=True)
    trainer = Trainer(config, make_mesh(config))
    result = trainer.step()
    trainer.close()
    assert (result.loss, result.grad_norm, result.of_model["mtp_loss"]) == (0.0, 0.0, 0.0)
    assert result.of_model.get("mtp_losses", [0.0]) == [0.0] * modules


def test_modules_read_and_predict_what_a_loop_finds():
    """Of random rows with documents and ignored targets."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(1, 9, (11, 3)), random.integers(1, 9, (11, 3))
    targets[random.random((11, 3)) < 0.3] = IGNORE_INDEX
    starts = np.maximum.accumulate(np.where(random.random((11, 3)) < 0.3, np.arange(11)[:, None], 0), axis=0)
    for documents in (starts, None):
        ahead = shifted(*(each if each is None else torch.from_numpy(each) for each in (tokens, targets, documents)), 3)
        for k, at, row in np.ndindex(3, 11, 3):
            further = at + k + 1
            inside = further < 11 and (documents is None or documents[further, row] == documents[at, row])
            assert ahead.targets[k, at, row] == (targets[further, row] if inside else IGNORE_INDEX)
            assert ahead.tokens[k, at, row] == (tokens[further, row] if further < 11 else 0)


def test_deepseek_v3_has_its_published_module():
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B unique parameters, and 14B with its copies of embedding and head; on the
    hub 685B in all."""
    model = ModelConfig(**preset("deepseek-v3"))
    with_module = ModelConfig(**preset("deepseek-v3") | {"mtp_layers": 1})
    main, whole = (parameter_count(model_specs(each)) for each in (model, with_module))
    hidden, inner = 7168, 2048
    attention = hidden * 1536 + 1536 + 1536 * 128 * 192 + hidden * 576 + 512 + 512 * 128 * 256 + 128 * 128 * hidden
    mixture = 256 * hidden + 257 * 3 * hidden * inner
    # norms: of the layer two, of both inputs, and the last one
    unique = 2 * hidden * hidden + attention + mixture + 5 * hidden
    assert (main, whole - main) == (671_026_404_352, unique) == (671_026_404_352, 11_610_067_968)
    assert whole + 2 * 129280 * hidden == pytest.approx(685e9, rel=1e-3)
    idle = (256 - 8) * 3 * hidden * inner
    assert active_parameters(with_module) - active_parameters(model) == unique - idle
