"""Jobs about the choice of the library of fp32 products."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from megalite.config.load import from_dict
from megalite.launch import matmul_library
from megalite.training.matmul_choice import choose
from tests.support.jobs import mesh_of


def settings_of(context: Any, config: dict[str, Any], seconds: list[dict[str, float]]) -> str:
    """This rank's setting after all have chosen, where the measurement on rank r finds seconds[r]."""
    made = from_dict(config)
    before = torch.get_float32_matmul_precision()
    try:
        with patch.object(matmul_library, "measure", lambda *_: seconds[context.rank]):
            choose(made, mesh_of(context, made), torch.device("cpu"))
        return torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
