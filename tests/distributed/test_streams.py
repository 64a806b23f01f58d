"""A run on a stream is one run: on every layout as on one process, and resumed with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import checkpoint
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.data.dataset import build
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.streams.lane import EVERY
from megalite.parallel.spec import Rectangle
from megalite.training.stream_positions import NAME
from megalite.training.tokenizer_checks import check_stream_vocabulary
from tests.data.streams import shares, write_jsonl, write_parquet
from tests.data.test_fill_in_the_middle import write_tokenizer
from tests.support import jobs_training

HALF, VOCAB = 2, 260
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Any]:
    """A blend of streams, and a token file that is rewritten for fill-in-the-middle."""
    path = tmp_path_factory.mktemp("corpus")
    tokenizer, texts = write_tokenizer(path / "tokenizer", FIM), path / "texts"
    for name in ("texts", "others"):
        (path / name).mkdir()
    jsonl, parquet = write_jsonl(texts, shares()), write_parquet(path / "others", shares())
    inputs = open_inputs([jsonl[6:]], exclude=[], file_format="auto", text_key="text", split="train")
    prepare(inputs, path / "tokens", tokenizer)
    return {
        "streams": {"train": {jsonl: 0.6, parquet: 0.4}, "tokenizer": tokenizer, "lanes": 4, "shuffle_buffer": 5},
        "fill in the middle": {"train": str(path / "tokens"), "fim_rate": 0.6},
    }


def configuration(data: dict[str, Any], directory: Path, load: str = "none", **parallel: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(directory), "name": "streamed"},
        "model": {
            **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.2},
        },
        "parallel": {"dp": 1, **parallel},
        "data": {"sequence_length": 16, "reset_positions": True, **data},
        "train": {"steps": 2 * HALF, "global_batch_size": 24, "micro_batch_size": 1, "precision": "fp64"},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "checkpoint": {"load": load},
    }


def test_the_model_has_the_ids_of_the_tokenizer(sources, tmp_path):
    config = configuration(sources["streams"], tmp_path)
    config["model"]["vocab_size"] = 259
    with pytest.raises(ConfigError, match="model.vocab_size = 259 is smaller .* data.tokenizer = .* .260 tokens"):
        resolved = from_dict(config)
        check_stream_vocabulary(resolved, build(resolved.data, 0)[0].vocab_size)


def saved_lanes(directory: str) -> tuple[int, ...]:
    return checkpoint.manifest_of(Path(directory)).tensors[NAME].shape


@pytest.mark.parametrize("kind", ["streams", "fill in the middle"])
def test_layouts_and_resuming(kind, ranks, references, sources, tmp_path):
    """Saved half-way by 4 ranks, continued with another number of data-parallel ranks."""
    data = sources[kind]
    expected = references.run(jobs_training.train_and_save, configuration(data, tmp_path / "one"), HALF, HALF)
    split = configuration(data, tmp_path / "four", dp=2, tp=2, sequence_parallel=True)
    saved = ranks.run(4, jobs_training.train_and_save, split, HALF, HALF)[0]
    assert saved["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    positions = torch.zeros(saved_lanes(saved["directory"]), dtype=torch.int64)
    checkpoint.load(Path(saved["directory"]), [Rectangle(NAME, tuple(positions.shape), (0, 0), positions)])
    rows = HALF * 24 // len(positions)  # of a lane; a member of a blend has some of them
    assert max(positions[:, 0].tolist()) == rows - rows % EVERY, "the positions are those of half-way"
    for world, layout in ((1, {}), (3, {"dp": 3})) if kind == "streams" else ((2, {"dp": 2, "zero": 1}),):
        config = configuration(data, tmp_path / str(world), saved["directory"], **layout)
        got = ranks.run(world, jobs_training.resume, config, HALF)[0]
        assert got["losses"] == pytest.approx(expected["losses"][HALF:], rel=1e-9)
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(got["tensors"][name], value, rtol=0, atol=1e-9, msg=name)
    assert len({*expected["losses"]}) == 2 * HALF
