"""Jobs that `megalite launch` prints, read by what they are for: the schemas of Kubeflow Trainer, JobSet and
Kubernetes, SkyPilot's parser, and a Ray cluster that loses a node during the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.commands.launch import main
from tests.components.environments import python_of
from tests.support.configs import write_tokens

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
OURS = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
MODEL = ["--model.preset", "llama-3.2-1b", "--model.vocab_size", "96", "--tp", "4", "--dp", "4"]
SHARED = ["--mount", "shared:/shared", "--run.dir", "/shared/runs", "--data.train", "/shared/corpus"]
MANY = [
    *("--resource", "rdma/hca=1", "--toleration", "spot=true:NoSchedule", "--toleration", "a:NoExecute"),
    *("--node_selector", "pool=gpu", "--time", "24h", "--cpus", "64", "--memory", "512Gi", "--namespace", "ml"),
    *("--env", "A=b", "--mount", "/scratch:/scratch:ro", "--shared_memory", "64Gi"),
]
KUBERNETES = {
    "trainjob": [],
    "trainjob, everything": [*MANY, "--runtime", "ours", "--config", "CONFIG"],
    "jobset": ["--kind", "jobset"],
    "jobset, everything": ["--kind", "jobset", *MANY, "--host_network", "--config", "CONFIG"],
    "jobset on the CPU": ["--kind", "jobset", "--device", "cpu", "--nnodes", "2"],
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("case", KUBERNETES)
def test_manifests_fit_their_schemas(case, capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  steps: 10\n")
    words = [word.replace("CONFIG", str(tmp_path / "run.yaml")) for word in KUBERNETES[case]]
    text = printed(capsys, "--on", "kubernetes", "--image", "image:1", *SHARED, *words, *MODEL)
    program = [python_of("kubeflow"), HERE / "kubernetes_schemas.py"]
    read = subprocess.run(program, input=text, capture_output=True, text=True, env=OUTSIDE)
    kind = "TrainJob" if case.startswith("trainjob") else "JobSet"
    config = "ConfigMap run-config\n" if "CONFIG" in KUBERNETES[case] else ""
    assert (read.returncode, read.stdout) == (0, f"{config}{kind} run\n"), read.stderr


def test_skypilot_reads_the_task(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  steps: 10\n")
    words = ["--gpu", "H100", "--spot", "--setup", "pip install megalite", "--env", "A=b", "--cpus", "32"]
    words += ["--mount", "s3://bucket/corpus:/corpus", "--mount", f"{tmp_path}:/here"]
    text = printed(capsys, "--on", "skypilot", *SHARED, *words, "--config", str(tmp_path / "run.yaml"), *MODEL)
    program = [python_of("skypilot"), HERE / "skypilot_task.py"]
    environment = OUTSIDE | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    read = subprocess.run(program, input=text, capture_output=True, text=True, env=environment)
    assert read.returncode == 0, read.stderr
    task = json.loads(read.stdout.splitlines()[-1])
    run = task.pop("run")
    assert task == {
        "name": "run",
        "nodes": 2,
        "accelerators": {"H100": 8},
        "cpus": "32+",
        "spot": True,
        "image": None,
        "recovery": {"max_restarts_on_errors": 3, "strategy": None},
        "files": {"~/megalite_configs/run.yaml": str(tmp_path / "run.yaml"), "/here": str(tmp_path)},
        "buckets": {"/corpus": "s3://bucket/corpus"},
        "volumes": {"/shared": "shared"},
        "environment": {"A": "b"},
        "setup": "pip install megalite",
    }
    # what it runs, with megalite in place of training
    stand_in = "python() { shift 3; printf '%s\\n' \"$@\"; }\n"
    shell = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": os.environ["PATH"]}
    words = subprocess.run(["bash", "-c", stand_in + run], capture_output=True, text=True, env=shell, check=True)
    launcher = ["--nproc", "8", "--max_restarts", "3", "--nnodes", "2", "--rdzv_endpoint", "10.0.0.1:29500"]
    assert words.stdout.splitlines() == [*launcher, *SHARED[2:], "--config", "~/megalite_configs/run.yaml", *MODEL]


STEPS = 30
OPTIONS = {
    **{"data.sequence_length": 16, "model.hidden_size": 32, "model.intermediate_size": 48},
    **{"model.num_hidden_layers": 2, "train.steps": STEPS, "train.global_batch_size": 4, "train.micro_batch_size": 2},
    **{"train.precision": "fp64", "checkpoint.interval": 5, "optimizer.lr": 3e-4},
}
LOSSES = {"fewer": ["--min_nodes", "1"], "another": []}
"""After the loss of one of two nodes: the other one goes on alone, or waits for another one."""


@pytest.mark.parametrize("then", LOSSES)
def test_a_run_on_ray_that_loses_a_node_is_the_run_that_never_did(then, tmp_path):
    data = ["--run.dir", str(tmp_path), "--data.train", write_tokens(tmp_path, 96)]
    words = [*data, *(part for option, value in OPTIONS.items() for part in (f"--{option}", str(value)))]
    environment = OUTSIDE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": OURS}
    megalite = [sys.executable, "-m", "megalite"]
    alone = [*megalite, "train", "--nproc", "2", *words, "--run.name", "uninterrupted"]
    subprocess.run(alone, env=environment, capture_output=True, check=True)

    program, job = tmp_path / "job.py", ["--device", "cpu", "--nnodes", "2", "--nproc", "1", "--run.name", "ray"]
    slow = ["--faults", "slow:step=6-30,seconds=0.3"]  # only in the first start: until the node is lost
    launch = [*megalite, "launch", "--on", "ray", *job, *LOSSES[then], *words, *slow, "--output", str(program)]
    subprocess.run(launch, env=environment, capture_output=True, check=True)
    cluster = [python_of("raytrain"), HERE / "ray_cluster.py", program, tmp_path / "ray", then]
    # Ray at first tries to start as many workers as before, for a minute by default
    environment |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
    ran = subprocess.run(cluster, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0 and "killing a raylet after step" in ran.stdout, ran.stdout[-4000:]
    assert (f"{1 if then == 'fewer' else 2} node" in ran.stdout) and "start 2: " in ran.stdout, ran.stdout[-4000:]
    expected, losses = losses_of(tmp_path / "uninterrupted"), losses_of(tmp_path / "ray")
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-9, abs=0) if then == "fewer" else losses == expected


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
