"""Token files prepared by the executors of Ray and datatrove, and a corpus without duplicates."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.components.environments import python_of
from tests.structure.sources import ROOT

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

small = {"num_cpus": 1, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
cluster.add_node(**small)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
OUTSIDE |= {"RAY_USAGE_STATS_ENABLED": "0"}
MEGALITE = ["env", f"PYTHONPATH={ROOT}:{ROOT / 'kernels'}", sys.executable, "-m", "megalite"]
WORDS = ["".join(random.Random(i).choices(string.ascii_lowercase, k=7)) for i in range(400)]


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=90)) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Files that are read in ranges, of which each is larger than a task."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts(700, number)]
        (directory / f"{number}.jsonl").write_text("".join(lines))
    return directory


def prepared(corpus: Path, prefix: Path) -> list[str]:
    return [*MEGALITE, "prepare", "--input", f"{corpus}/*.jsonl", "--tokenizer", "byte", "--output", str(prefix)]


def run(words: list[Any], **options: Any) -> str:
    options = {"env": OUTSIDE, **options}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(prefix: Path) -> dict[str, bytes]:
    paths = [path for path in prefix.parent.iterdir() if path.name.startswith(f"{prefix.name}.") or "-of-" in path.name]
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in paths}


@pytest.fixture
def expected(corpus, tmp_path) -> dict[str, bytes]:
    run(prepared(corpus, tmp_path / "one" / "x"))
    return files(tmp_path / "one" / "x")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes."""
    with subprocess.Popen(
        [python_of("ray"), "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=OUTSIDE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_ray(corpus, expected, cluster, tmp_path):
    """Two nodes, and a second start, which finds the merged file."""
    prefix, script = tmp_path / "many" / "x", ROOT / "tools" / "preparation" / "ray_shards.py"
    words = [python_of("ray"), script, "--address", cluster, "--cpus", "1", "--shards", "4", "--"]
    assert "4 shards prepared on 2 nodes" in run([*words, *prepared(corpus, prefix)])
    assert files(prefix) == expected
    assert "already prepared" in run([*words, *prepared(corpus, prefix)])


def test_datatrove(corpus, expected, tmp_path):
    prefix, script = tmp_path / "many" / "x", ROOT / "tools" / "preparation" / "datatrove_shards.py"
    words = [python_of("datatrove"), script, "--shards", "3", "--cpus", "1", "--logs", tmp_path / "logs", "--"]
    run([*words, *prepared(corpus, prefix)])
    assert files(prefix) == expected


def test_slurm_array(corpus, expected, tmp_path):
    """The script of a job array, with SLURM's variables; without them it merges."""
    prefix, script = tmp_path / "many" / "x", ROOT / "tools" / "preparation" / "prepare.sbatch"
    words = ["bash", script, *prepared(corpus, prefix)[len(MEGALITE) + 1 :]]
    for number in (2, 1, ""):
        array = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "2"} if number else {}
        run(words, env=OUTSIDE | array | {"MEGALITE": " ".join(MEGALITE)})
    assert files(prefix) == expected


def test_duplicates(tmp_path):
    """Planted copies and near copies are removed, and nothing else."""
    different = texts(40)
    near = []
    for number, text in enumerate(different[:5]):
        words = text.split()
        words[10 * number] = "changed"
        near.append(" ".join(words))
    planted = [*different, *different[20:26], *near]
    random.Random(1).shuffle(planted)
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        lines = [json.dumps({"body": text, "n": number}) + "\n" for text in planted[number::3]]
        (tmp_path / "corpus" / f"{number}.jsonl").write_text("".join(lines))
    script = ROOT / "tools" / "preparation" / "deduplicate.py"

    def left(method: str) -> list[str]:
        words = [
            python_of("datatrove"),
            script,
            "corpus",
            method,
            "--method",
            method,
            "--text_key",
            "body",
            "--tasks",
            "2",
        ]
        run(words, cwd=tmp_path)
        read = [path.read_text().splitlines() for path in sorted((tmp_path / method).glob("*.jsonl"))]
        return [json.loads(line)["text"] for lines in read for line in lines]

    assert sorted(left("exact")) == sorted([*different, *near])
    kept = left("both")
    assert len(kept) == 40
    assert {*different[5:]} <= {*kept}
    assert all((text in kept) != (other in kept) for text, other in zip(different, near, strict=False))
    run([*MEGALITE, "prepare", "--input", "both/*.jsonl", "--tokenizer", "byte", "--output", "x"], cwd=tmp_path)
    assert json.loads((tmp_path / "x.json").read_text())["documents"] == 40
