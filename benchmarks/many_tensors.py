"""Import and export of a model with tens of thousands of Hugging Face tensors.

This measures the time for names, not for bytes.

    python -m benchmarks.many_tensors [--output benchmarks/results]

A Qwen3-MoE of tiny tensors with 256 experts in each of 58 layers has 44,544 expert tensors, as many as
DeepSeek-V3. A half and a quarter of the layers are also measured, so that a cost that grows faster than the
number of names shows in the microseconds per name. Writes MACHINE-names.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from megalite.commands.parser import Parser
from megalite.config.sections.model import ModelConfig
from megalite.families.weight_files import INDEX, SAFETENSORS
from megalite.huggingface.config_json import to_hf_config
from megalite.huggingface.convert import export_model, import_model
from megalite.huggingface.files import NewFile
from megalite.huggingface.source import HuggingFaceSource
from megalite.huggingface.tensor_places import places

EXPERTS, LAYERS = 256, (15, 29, 58)
FILES = 163  # of DeepSeek-V3
COLUMNS = {
    "names": "names:,",
    "open s": "open:.2f",
    "import s": "import:.2f",
    "export s": "export:.2f",
    "import, µs a name": "import_us:.0f",
    "export, µs a name": "export_us:.0f",
}


def model_of(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        qk_norm="head",
        num_experts=EXPERTS,
        num_experts_per_tok=8,
    )


def write_model(directory: Path, model: ModelConfig) -> int:
    """Write a Hugging Face directory with many files and an index. Return the number of tensors."""
    directory.mkdir()
    config = to_hf_config(model, "qwen3_moe")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {
        name: shape for place in places(model, "qwen3_moe").values() for name, shape in place.tensors.items()
    }
    names, index = list(shapes), dict[str, str]()
    for number in range(FILES):
        own, file = names[number::FILES], f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        with closing(
            NewFile(directory / file, {name: (torch.bfloat16, shapes[name]) for name in own})
        ) as written:
            for name in own:
                written.write(name, torch.randn(prod(shapes[name]), dtype=torch.bfloat16))
        index |= dict.fromkeys(own, file)
    (directory / f"{SAFETENSORS}{INDEX}").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return len(names)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        names = write_model(place / "model", model_of(layers))
        opened = seconds(lambda: HuggingFaceSource.of(place / "model"))
        imported = seconds(lambda: import_model(place / "model", place / "checkpoint"))
        exported = seconds(lambda: export_model(place / "checkpoint", place / "exported"))
    us = {f"{name}_us": 1e6 * time / names for name, time in (("import", imported), ("export", exported))}
    return {"names": names, "open": opened, "import": imported, "export": exported, **us}


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="directory of the results"
    )
    options = tool.parse_args()
    rows = [measure(layers) for layers in LAYERS]
    print(report.table(rows, COLUMNS))
    print(report.write("names", {"results": rows}, options.output, None))


if __name__ == "__main__":
    main()
