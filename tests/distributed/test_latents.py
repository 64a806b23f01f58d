"""Adapters on the projections of latent attention train as on one process; `test_attention.py` has the layouts without adapters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.support import jobs_lora
from tests.distributed.support.attention_layouts import LATENTS
from tests.distributed.support.configs import config_of, write_tokens
from tests.distributed.support.jobs_experts import BASE

STEPS = 3


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def test_adapters_on_latents_train_like_those_of_one_process(ranks, references, prefix):
    """With dropout, under a split sequence and a split backward: the matrices of latents are whole on each rank, the others split."""

    def config(**layout: Any) -> dict[str, Any]:
        lora = {"rank": 3, "alpha": 8.0, "dropout": 0.1, "dora": True}
        made = config_of({**BASE, **layout}, prefix, "fp64", lora=lora, optimizer={"lr": 3e-3})
        made["model"] |= LATENTS | {"q_lora_rank": 16}
        return made

    expected = references.run(jobs_lora.train, config(microbatches=1), STEPS)
    for rank in ranks.run(2, jobs_lora.train, config(tp=2, sequence_parallel=True, schedule="zb-h1", microbatches=2), STEPS):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
