"""The SLURM script, with stand-ins for SLURM's commands: one node, two training processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.distributed.test_torchrun import ROOT, checkpoint_step, command, finish, steps_of, wait_for_steps
from tests.support.configs import write_tokens

STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$CALLS"; fi',
    # Without its option; signals reach the whole process group of a task, as SLURM sends them.
    "srun": """shift; setsid "$@" & task=$!; trap 'kill -USR1 -- -$task' USR1; wait $task; status=$?
while kill -0 $task 2> /dev/null; do wait $task; status=$?; done; exit $status""",
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def test_the_job_saves_before_its_end_and_queues_itself_again(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run, port = tmp_path / "run", str(20_000 + os.getpid() % 20_000)
    full = command(run, write_tokens(tmp_path, 96))
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NNODES": "1",
        "CALLS": str(tmp_path / "calls"),
        "PORT": port,
    }
    ours = {
        "TORCHRUN": str(tmp_path / "torchrun"),
        "PROCESSES": "2",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        ["bash", "tools/slurm/train.sbatch", *full[full.index("pretrain.py") + 1 :], "--train.stop_after", "100s"],
        cwd=ROOT,
        env={**os.environ, **job, **ours, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_steps(run, process, 2)
    process.send_signal(signal.SIGUSR1)
    status, output = finish(process)
    assert status == 0 and "stopping after step" in output and "repeat the command to resume" in output, output
    assert steps_of(run)[-1] == checkpoint_step(run)
    assert (tmp_path / "calls").read_text() == "requeue 17\n"
