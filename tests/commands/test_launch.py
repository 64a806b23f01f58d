"""Jobs for clusters: the nodes that a layout fills, what a scheduler cannot do, and SLURM's script with stand-ins for
its commands. tests/components reads the other specifications with the programs that they are for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megalite.commands.launch import main
from tests.distributed.test_torchrun import ROOT, TIMEOUT, checkpoint_step, command, steps_of
from tests.support.configs import write_tokens

MODEL = ["--model.preset", "llama-3.2-1b", "--model.vocab_size", "96", "--train.global_batch_size", "192"]
SHARED = ["--mount", "claim:/shared", "--run.dir", "/shared/runs", "--data.train", "/shared/corpus"]
NODES = {
    "--tp 4 --dp 2": (1, 8),
    "--tp 2 --dp 2": (1, 4),
    "--tp 8 --pp 2 --dp 2": (4, 8),
    "--tp 4 --cp 2 --dp 4 --nproc 4": (8, 4),
    "--dp 4 --nnodes 2": (2, 2),
    "--tp 4 --nnodes 2": (2, 8),
    "--tp 4 --nnodes 2 --nproc 4": (2, 4),
    "--dp 48 --profiling.hardware gb200": (1, 48),
    "--dp 3 --device cpu": (1, 3),
}
"""Options → nodes, and ranks on each."""
MISTAKES = {
    "--on slurm": "The number of nodes is unknown, because parallel.dp is not set. Set --dp N or --nnodes N.",
    "--on slurm --tp 4 --dp 3": "tp 4 · pp 1 · cp 1 · dp 3 = 12 ranks do not fill nodes of 8: they need 1.5. Change "
    "parallel.dp, or set --nproc 6 for 2 nodes of 6 ranks.",
    "--on slurm --dp 8 --nnodes 3": "8 ranks do not fit --nnodes 3.",
    "--on slurm --dp 8 --nnodes 2 --nproc 8": "8 ranks do not fit --nnodes 2 and --nproc 8.",
    "--on slurm --dp 32 --nnodes 2": "--nnodes 2 puts 16 of the 32 ranks on a node of 8 GPUs. Set --nnodes 4 or more",
    "--on slurm --tp 3 --dp 1": "parallel.tp = 3",
    "--on slurm --dp 1 --namespace a": "--namespace is only valid with --on kubernetes, got --on slurm. Remove it.",
    "--on slurm --dp 1 --mount a": "--mount a is not SOURCE:TARGET with an absolute path as TARGET.",
    "--on slurm --dp 1 --env A": "'A' is not NAME=VALUE",
    "--on slurm --dp 1 --time 1d": "--time 1d is not a duration. Use hours, minutes and seconds",
    "--on slurm --dp 1 --name A_b": "Nearest: a-b.",
    "--on slurm --dp 1 --output FILE --submit": "--submit needs the program sbatch, which is not on this machine.",
    "--on ray --dp 1": "run.dir = runs is relative",
    "--on ray --dp 1 --run.dir s3://a/b": "--storage is required with run.dir = s3://a/b in an object store",
    "--on ray --dp 1 --run.dir /a --storage b": "--storage b is neither an absolute path nor a URL",
    "--on ray --dp 1 --time 3h": "--time is not supported with --on ray: Ray has no time limit; set --train.stop_after",
    "--on ray --run.dir /shared --nnodes 4 --nproc 2 --tp 4 --min_nodes 1": "--min_nodes 1: the run is not valid on 1 ",
    "--on ray --dp 1 --grace 3m": "--grace is not supported with --on ray: Ray sends no signal",
    "--on ray --run.dir /shared --dp 2 --nnodes 2 --min_nodes 3": "--min_nodes 3 must be at most the number of nodes",
    "--on kubernetes --dp 1": "run.dir = runs is not below the TARGET of a --mount, but the file system of a pod",
    "--on kubernetes --dp 1 SHARED": "--image is required on Kubernetes",
    "--on kubernetes --dp 1 SHARED --image a --host_network": "--host_network is not supported with --kind trainjob",
    "--on kubernetes --dp 1 SHARED --image a --port 3": "--port is not supported with --kind trainjob",
    "--on kubernetes --dp 1 SHARED --image a --toleration b": "--toleration b is not KEY:EFFECT",
    "--on kubernetes --dp 1 SHARED --image a --env PET_NNODES=2": "--env PET_NNODES is set by Kubeflow Trainer.",
    "--on kubernetes --dp 1 SHARED --image a --mount s3://b:/b": "s3://b is neither an absolute path of the hosts nor",
    "--on kubernetes --dp 1 SHARED --image a --mount b/c:/b": "b/c is neither an absolute path of the hosts nor",
    "--on skypilot --dp 1 SHARED": "--gpu is required with SkyPilot",
    "--on skypilot --dp 1 SHARED --gpu H100": "--setup or --image is required with SkyPilot",
}
"""Words → part of the message."""


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, *MODEL]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", NODES)
def test_a_layout_fills_nodes(words, capsys):
    text = launched(capsys, "--on", "slurm", *words.split())
    nodes, ranks = (re.search(rf"^#SBATCH --{name}=(\d+)$", text, re.MULTILINE) for name in ("nodes", "gpus-per-node"))
    count, each = NODES[words]
    assert nodes is not None and int(nodes[1]) == count
    assert (ranks is None) == ("cpu" in words) and (ranks is None or int(ranks[1]) == each)
    assert f"--nproc {each} --max_restarts 3" in text and (f"--nnodes {count} " in text) == (count > 1)
    assert f"# Made by: megalite launch --on slurm {words} " in text


@pytest.mark.parametrize("words", MISTAKES)
def test_what_cannot_be_launched_is_one_message(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    each = words.replace("SHARED", " ".join(SHARED)).replace("FILE", str(tmp_path / "job")).split()
    with pytest.raises(SystemExit) as end:
        main([*each, *MODEL])
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.startswith("megalite launch: ") and MISTAKES[words] in errors, errors


def test_configuration_files_go_to_the_pods(capsys, tmp_path):
    """Shipped ones are in the image; those of the user become a ConfigMap, in their order, with names that it takes."""
    for name, steps in (("a 1", 10), ("b/a 1", 20)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"train:\n  steps: {steps}  # twice\n")
    files = ["--config", "quickstart", "--config", f"{tmp_path}/a 1.yaml", f"--config={tmp_path}/b/a 1.yaml"]
    text = launched(capsys, "--on", "kubernetes", "--dp", "1", "--image", "a", *SHARED, *files)
    configs, job = yaml.safe_load_all(text)
    texts = {name: f"train:\n  steps: {steps}  # twice\n" for name, steps in (("a-1.yaml", 10), ("2-a-1.yaml", 20))}
    assert configs["data"] == texts
    words = job["spec"]["trainer"]["args"]
    assert words[-5 - len(MODEL) : -len(MODEL)] == [
        *files[:3],
        "/etc/megalite/a-1.yaml",
        "--config=/etc/megalite/2-a-1.yaml",
    ]


STORED = {
    "kubernetes": "--image a",
    "skypilot": "--gpu H100 --setup true",
    "ray": "--storage /shared/ray",
}


@pytest.mark.parametrize("on", STORED)
@pytest.mark.parametrize("data", ["s3://bucket/a", '{"s3://bucket/a": 1, "gs://bucket/a": 2}', "jsonl:s3://bucket/a"])
def test_object_stores_need_no_mount_and_are_not_contacted(on, data, capsys, monkeypatch):
    monkeypatch.setattr("megalite.stores.object_store.store_of", lambda url: pytest.fail(f"contacts {url}"))
    monkeypatch.setattr("megalite.stores.token_files.store_of", lambda url: pytest.fail(f"contacts {url}"))
    words = ["--run.dir", "s3://bucket/runs", "--data.train", data, "--data.validation", "s3://bucket/b"]
    words += ["--data.tokenizer", "byte"] if data.startswith("jsonl") else []
    assert main(["--on", on, "--dp", "1", *words, *STORED[on].split(), *MODEL[:2], "--model.vocab_size", "300"]) == 0
    printed = capsys.readouterr()
    assert "s3://bucket/runs" in printed.out and "s3://bucket/a" in printed.out and "./s3" not in printed.out
    assert not printed.err
    assert on != "ray" or "storage='/shared/ray'" in printed.out


def test_streams_outside_of_mounts_are_noted(capsys):
    words = ["--image", "a", *SHARED[:4], "--data.train", "jsonl:/data/a.jsonl", "--data.tokenizer", "byte"]
    assert main(["--on", "kubernetes", "--dp", "1", *words, *MODEL[:2], "--model.vocab_size", "300"]) == 0
    assert capsys.readouterr().err == "Note: data.train = jsonl:/data/a.jsonl is not below the TARGET of a --mount.\n"


def test_what_restarts_a_jobset(capsys):
    """A wrong configuration ends it; a run directory in use may be that of an evicted pod, whose lock expires."""
    text = launched(capsys, "--on", "kubernetes", "--kind", "jobset", "--dp", "1", "--image", "a", *SHARED)
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules} == {"FailJob": [2], "Ignore": [75]}


ENDS = {"return 0": 0, "return 75": 0, "return 1": 1, "kill -TERM $$; return 75": 75}
"""What `megalite train` does → the status of a task of SkyPilot, which it starts again unless that is 0."""


@pytest.mark.parametrize("training", ENDS)
def test_a_run_that_stops_by_itself_is_done_for_skypilot(training, capsys):
    words = ["--dp", "1", *STORED["skypilot"].split(), *SHARED]
    run = yaml.safe_load(launched(capsys, "--on", "skypilot", *words))["run"]
    task = f"set -e\npython() {{ {training}; }}\n{run}"
    assert subprocess.run(["bash", "-c", task]).returncode == ENDS[training]


@pytest.mark.parametrize("output", ["here/job.py", "here/jobs/job.py", "there/job.py"])
def test_ray_copies_the_program_and_its_configurations(output, capsys, tmp_path, monkeypatch):
    """The current directory, or that of a program which is elsewhere: paths are relative to it."""
    for name in ("here/jobs", "there"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("here/a.yaml", "there/b.yaml"):
        (tmp_path / name).write_text("train:\n  steps: 10\n")
    monkeypatch.chdir(tmp_path / "here")
    words = ["--dp", "1", "--run.dir", "/shared", "--config", "a.yaml", f"--config={tmp_path}/there/b.yaml"]
    assert main(["--on", "ray", *words, "--output", str(tmp_path / output), *MODEL]) == 0
    printed = capsys.readouterr()
    copied, program = {"there": (f"{tmp_path}/there", "job.py")}.get(output.split("/")[0], (".", output[5:]))
    assert f"--working-dir {copied} -- python {program}\n" in printed.out
    outside = f"{tmp_path}/there/b.yaml" if copied == "." else "a.yaml"
    assert f"Note: --config {outside} is not below {(tmp_path / output[:5]).resolve()}" in printed.err
    text = (tmp_path / output).read_text()
    assert "'--config', 'a.yaml'" in text and ("'--config=b.yaml'" in text) == (copied != ".")


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_texts_that_look_like_numbers_stay_texts(kind, capsys):
    """Also for kubectl, which reads another YAML than PyYAML."""
    words = ["--kind", kind, "--image", "a", "--optimizer.lr", "3e-4", "--env", "X=1e3", *SHARED]
    text = launched(capsys, "--on", "kubernetes", "--dp", "1", *words)
    assert "- '3e-4'\n" in text and "value: '1e3'\n" in text


@pytest.mark.parametrize("words", ["", "--image a.sqsh --mount /data:/data:ro", "--image a.sif --container apptainer"])
def test_slurms_script_is_clean(words, capsys, tmp_path):
    more = ["--env", "A=it's a b", "--sbatch", "qos=high", "--time", "25h1s", "--nnodes", "2", *words.split()]
    text = launched(capsys, "--on", "slurm", *more)
    assert "#SBATCH --time=25:00:01\n" in text and "#SBATCH --qos=high\n" in text
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "-"], input=text, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$CALLS"; fi',
    # A task for each node. A signal goes to the whole process group of a task, as SLURM sends it.
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
for _ in $(seq "$SLURM_NNODES"); do setsid "$@" & tasks="$tasks $!"; done
trap 'for task in $tasks; do kill -USR1 -- -$task; done' USR1
for task in $tasks; do
    while kill -0 $task 2> /dev/null; do wait $task; done
    wait $task; own=$?; [ $own -gt $status ] && status=$own
done
exit $status""",
    "sbatch": """(setsid bash -c 'echo $$ > "$CALLS.pid"; exec bash "$0" "$@"' "$@" > "$CALLS.log" 2>&1
echo $? > "$CALLS.end") > /dev/null 2>&1 &
echo Submitted batch job 17""",
}
SCRIPTS = {
    "megalite launch": ["megalite", "launch", "--on", "slurm", "--device", "cpu", "--nnodes", "2", "--submit"],
    "train.sbatch": ["sbatch", "tools/slurm/train.sbatch"],
}
"""How a job is submitted, up to the options of the run."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_of_two_nodes_saves_before_its_end_and_queues_itself_again(script, tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ntasks= status=0\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run, port, calls = tmp_path / "run", str(20_000 + os.getpid() % 20_000), tmp_path / "calls"
    options = command(run, write_tokens(tmp_path, 96))
    options = options[options.index("pretrain.py") + 1 :]
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "CALLS": str(calls)}
    ours = {"PYTHON": sys.executable, "PROCESSES": "1", "PORT": port, "OMP_NUM_THREADS": "1"}
    words = [*SCRIPTS[script], *options, "--train.stop_after", "100s"]
    if words[0] == "megalite":
        words = [sys.executable, "-m", *words, "--port", port, "--output", str(tmp_path / "job.sbatch")]
    environment = {**os.environ, **job, **ours, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    log = Path(f"{calls}.log")
    log.touch()
    submitted = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (submitted.returncode, submitted.stdout) == (0, "Submitted batch job 17\n"), submitted.stderr

    def until(happened) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not happened():
            assert time.monotonic() < deadline and "Error" not in log.read_text(), log.read_text()
            time.sleep(0.05)

    until(lambda: len(steps_of(run)) >= 2)
    os.kill(int(Path(f"{calls}.pid").read_text()), signal.SIGUSR1)
    until(Path(f"{calls}.end").exists)
    assert Path(f"{calls}.end").read_text() == "75\n", log.read_text()
    assert calls.read_text() == "requeue 17\n"
    assert "stopping after step" in log.read_text() and "repeat the command to resume" in log.read_text()
    assert steps_of(run)[-1] == checkpoint_step(run)
