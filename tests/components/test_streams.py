"""MDS shards of MosaicML's writer, against the documents that it has written."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from megalite.config.sections.data import DataConfig
from megalite.data.dataset import build
from tests.components.environments import python_of
from tests.data.streams import TEXTS
from tests.data.test_streams import documents, lane

WRITER = """
import importlib.util, json, sys, types

# its __init__ imports torchvision, whose wheel may not fit that of torch
places = importlib.util.find_spec("streaming").submodule_search_locations
package = sys.modules["streaming"] = types.ModuleType("streaming")
package.__path__ = list(places)
from streaming.base import MDSWriter

for options in json.loads(sys.argv[1]):
    columns = {"id": "int64", "content": options["encoding"], "extra": "bytes"}
    with MDSWriter(columns=columns, size_limit=4096, out=options["out"], compression=options["compression"]) as writer:
        for i, text in enumerate(json.loads(sys.argv[2])):
            writer.write({"id": i, "content": text, "extra": b"x" * (i % 5)})
"""
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


KINDS = [(None, "str"), ("zstd:7", "str"), ("gz", "json")]


def test_mds(tmp_path):
    options = [
        {"out": str(tmp_path / str(number)), "compression": compression, "encoding": encoding}
        for number, (compression, encoding) in enumerate(KINDS)
    ]
    words = [python_of("mds"), "-c", WRITER, json.dumps(options), json.dumps(TEXTS)]
    subprocess.run(words, check=True, env=OUTSIDE)
    texts = [text for text in TEXTS if text]
    reading: dict[str, Any] = {"lanes": 1, "shuffle": False, "sequence_length": 32}
    for number, kind in enumerate(KINDS):
        out = tmp_path / str(number)
        assert len(json.loads(Path(out, "index.json").read_text())["shards"]) > 2
        config = DataConfig(f"mds:{out}", None, text_key="content", tokenizer="byte", **reading)
        data, _ = build(config, 1)
        assert documents(lane(data, 0, 1, 500))[: 2 * len(texts)] == texts * 2, kind
