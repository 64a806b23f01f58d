"""Runs with real trackers: a server of MLflow that is killed or hangs, Trackio's database, W&B offline."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.components.environments import python_of
from tests.structure.sources import ROOT
from tests.support.configs import write_tokens

LIMIT_S = 300  # what a test waits for another process
GATE = """
import os, time
from megalite.config.extensions import observer
from megalite.monitoring.observers import Observer

@observer
class Gate(Observer):  # holds a run before a step for which there is a file: the test acts meanwhile
    def __init__(self, trainer):
        pass

    def before(self, step):
        while os.path.exists(f"hold_{step}"):
            time.sleep(0.02)
"""


class Run:
    """A training run of a few tiny steps in a component's environment, beside files in `directory`."""

    def __init__(self, component: str, directory: Path, *words: str, **environment: str):
        self.directory, self.words, self.python = directory, words, python_of(component)
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environment}
        self.prefix = write_tokens(directory, 64)
        (directory / "gate.py").write_text(GATE)

    def start(self, steps: int, *words: str) -> subprocess.Popen[str]:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        options = {
            **{f"model.{name}": size for name, size in sizes.items()},
            **{"data.train": self.prefix, "data.sequence_length": 8, "train.global_batch_size": 2},
            **{"train.micro_batch_size": 1, "train.steps": steps, "optimizer.decay": "constant"},
            **{"run.dir": "runs", "run.name": "tracked", "run.extensions": "[gate.py]", "checkpoint.interval": 2},
        }
        given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return subprocess.Popen(
            [self.python, "-m", "megalite", "train", *given, *self.words, *words],
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def hold(self, step: int) -> Path:
        file = self.directory / f"hold_{step}"
        file.touch()
        return file

    def steps(self) -> dict[int, float]:
        """The losses in metrics.jsonl, by step."""
        file = self.directory / "runs/tracked/metrics.jsonl"
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def ask(self, program: str, *words: str) -> object:
        """What a program in the component's environment prints, as JSON."""
        done = subprocess.run(
            [self.python, "-c", program, *words],
            cwd=self.directory,
            env={name: value for name, value in self.environment.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output


def until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def mlflow_server(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A tracking server over a database in `directory`; killed with its workers at the end."""
    words = ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(directory / "server.log", "ab") as log:
        server = subprocess.Popen(
            [python_of("mlflow"), "-m", "mlflow", "server", *words, "--port", str(port), "--workers", "1"],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def answers() -> bool:
        assert server.poll() is None, (directory / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        until(answers)
        yield server
    finally:
        kill(server)


def kill(server: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


MLFLOW_RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        history = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
                   for name in ("loss", "system/peak_memory_bytes", "val_loss")}
        found.append({"experiment": experiment.name, "id": run.info.run_id, "status": run.info.status,
                      "name": run.info.run_name, "tags": run.data.tags, "params": run.data.params, "metrics": history})
print(json.dumps(found))
"""


def test_a_run_outlives_a_server_of_mlflow_and_continues_under_its_identifier(tmp_path: Path):
    port = free_port()
    words = ["--nproc", "2", "--logging.mlflow", "tiny", "--logging.mlflow_tags", '{"team": "a"}']
    run = Run("mlflow", tmp_path, *words, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}")
    store = f"sqlite:///{tmp_path}/server.db"
    held = run.hold(5)
    with mlflow_server(tmp_path, port) as server:
        process = run.start(8, "--validation.interval", "4", "--data.validation", "0.1")
        until(lambda: len(run.steps()) == 4, process)
        until(lambda: len(run.ask(MLFLOW_RUNS, store)[0]["metrics"]["loss"]) == 4)  # type: ignore[index]
        kill(server)
    held.unlink()
    output = end(process)
    assert output.count("MLflow failed: ") == 1 and "Traceback" not in output, output
    # four steps and a validation
    assert "MLflow lacks 5 of the 10 lines of this start: " in output, output
    (stored,) = run.ask(MLFLOW_RUNS, store)  # type: ignore[misc]
    assert (stored["experiment"], stored["name"], stored["status"]) == ("tiny", "tracked", "RUNNING")

    held = run.hold(11)
    with mlflow_server(tmp_path, port) as server:
        process = run.start(
            12, "--checkpoint.allow", "[horizon]", "--validation.interval", "4", "--data.validation", "0.1"
        )
        until(lambda: len(run.steps()) == 10, process)
        kill(server)
    with mlflow_server(tmp_path, port):
        held.unlink()
        output = end(process)
    assert "lacks" not in output, output
    (again,) = run.ask(MLFLOW_RUNS, store)  # type: ignore[misc]
    assert again["id"] == stored["id"] == (tmp_path / "runs/tracked/mlflow_id").read_text()
    assert again["status"] == "FINISHED" and again["tags"]["team"] == "a"
    assert again["params"]["optimizer.decay"] == "constant" and again["params"]["parallel.dp"] == "2"
    assert again["params"]["train.steps"] == "8" and again["tags"]["resumed.train.steps"] == "12"
    losses = run.steps()
    wanted = [[step, losses[step]] for step in (1, 2, 3, 4, 9, 10, 11, 12)]
    assert again["metrics"]["loss"] == wanted
    assert [step for step, _ in again["metrics"]["val_loss"]] == [4, 12]
    assert len(again["metrics"]["system/peak_memory_bytes"]) == 8


def test_a_server_that_accepts_and_never_answers_holds_no_step(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts for it
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        run = Run("mlflow", tmp_path, "--logging.mlflow", "true", MLFLOW_HTTP_REQUEST_TIMEOUT="600")
        output = end(run.start(5, "--logging.mlflow_uri", uri))
    assert len(run.steps()) == 5
    assert "MLflow lacks 5 of the 5 lines of this start: it did not answer within 30 s" in output, output


def test_trackio_continues_the_run_of_its_database(tmp_path: Path):
    words = ["--logging.trackio", "tiny", "--logging.trackio_group", "sizes"]
    run = Run("trackio", tmp_path, *words, TRACKIO_DIR=str(tmp_path / "trackio"))
    end(run.start(3))
    end(run.start(5, "--checkpoint.allow", "[horizon]"))
    name = (tmp_path / "runs/tracked/trackio_name").read_text()
    with closing(sqlite3.connect(tmp_path / "trackio/tiny.db")) as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by step").fetchall()
        (config,) = (json.loads(text) for (text,) in database.execute("select config from configs"))
    assert len({run_id for run_id, *_ in rows}) == 1 and {row[1] for row in rows} == {name}
    assert {step: json.loads(metrics)["loss"] for *_, step, metrics in rows} == run.steps()
    assert config["_Group"] == "sizes" and config["optimizer"]["decay"] == "constant"


def test_wandb_offline_continues_under_its_identifier(tmp_path: Path):
    run = Run("wandb", tmp_path, "--logging.wandb", "tiny", "--logging.wandb_mode", "offline")
    end(run.start(2))
    output = end(run.start(3, "--checkpoint.allow", "[horizon]"))
    assert "Weights & Biases" not in output, output
    identity = (tmp_path / "runs/tracked/wandb_id").read_text()
    stored = sorted((tmp_path / "runs/tracked/wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert [file.read_bytes().count(b"tokens_per_second_per_gpu") > 0 for file in stored] == [True, True]
