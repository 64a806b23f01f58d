"""The directory of a newcomer who follows the manual: a clone, texts, conversations, a small Llama.

`commands` reads the commands of a page, `run` runs one as written.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.data.chats import CHATML, write_lines, write_tokenizer
from tests.huggingface.hf_models import DELTA, EXPERTS, LINEAR, NARROW, SHARED, SIZES, Case
from tests.huggingface.hf_models import write as write_model
from tests.structure.sources import ROOT

LINKED = ("tools", "configs", "pretrain.py", "megalite", "Makefile", "pyproject.toml", "constraints.txt")
IMPORTED = {
    "ds_config.json": '{"train_batch_size": 32, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
    "default_config.yaml": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n",
    "train_llama3_8b.sh": "TP=2\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP --lr 3e-4 2>&1 | tee log\n",
    "train.sh": "if [ $1 = 8B ]; then LAYERS=32; fi\n"
    "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers $LAYERS --global-batch-size $2\n",
    "llama3_8b.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n',
    "lora-8b.yml": "base_model: models/llama\nadapter: lora\nlora_r: 8\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\n",
    "dpo.yaml": "model_name_or_path: models/llama\ndataset_name: preferences\nbeta: 0.1\nlearning_rate: 5.0e-6\n"
    "per_device_train_batch_size: 2\nmax_length: 1024\n",
}
"""Configurations of other programs."""
BLOCK = re.compile(r'^```sh(?: title="([^"\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
BATCH = "--train.global_batch_size 8 --train.micro_batch_size 2 --data.sequence_length 32"
SHORT = {  # appended: later options win
    "prepare": "--workers 1 --overwrite",  # several pages show their own data under one name
    "train": f"--train.steps 2 --optimizer.warmup_steps 1 {BATCH}",
    "generate": "--tokens 3",
    "verify": BATCH,
}


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        title: what its block needs that may be missing.
        redirected: the file after `<`.
        output: the file after `>`.
    """

    page: str
    text: str
    title: str = ""
    redirected: str | None = None
    output: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands(page: str) -> list[Command]:
    """The commands of a page's `sh` blocks, in order."""
    parsed = []
    for title, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            text, _, output = line.partition(" > ")
            text, _, redirected = text.partition(" < ")
            parsed.append(Command(page, text, title, redirected.strip() or None, output.strip() or None))
    return parsed


def make_place(place: Path) -> Path:
    """Fill a directory: a clone, texts, conversations, configurations of other programs, and small models."""
    for name in LINKED:
        (place / name).symlink_to(ROOT / name)
    for name, content in IMPORTED.items():
        (place / name).write_text(content)
    sizes = {**SIZES, "vocab_size": 264, "tie_word_embeddings": True}
    write_tokenizer(write_model(Case("Llama", sizes), place / "models" / "llama"), CHATML)
    mixtral = {**sizes, **EXPERTS, "num_local_experts": 4}
    write_tokenizer(write_model(Case("Mixtral", mixtral), place / "models" / "mixtral"), CHATML)
    hybrid = sizes | NARROW | SHARED | DELTA | {"head_dim": 16, "layer_types": LINEAR}
    write_tokenizer(write_model(Case("Qwen3Next", hybrid), place / "models" / "qwen3-next"), CHATML)
    answer = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    write_lines(place / "chats.jsonl", [answer] * 40)
    write_lines(place / "preferences.jsonl", [{"prompt": "?", "chosen": "!", "rejected": "."}] * 40)
    write_lines(place / "votes.jsonl", [{"prompt": "?", "completion": "!", "label": bool(i % 2)} for i in range(40)])
    (place / "corpus").mkdir()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:  # enough text for 8,192 pieces
        (place / "corpus" / f"{source.stem}.txt").write_bytes(source.read_bytes())
    return place


def run(words: list[str], place: Path, redirected: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the newcomer's directory, with the programs of this environment as if it were activated."""
    # `make test` may have started this
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    source = None if redirected is None else (place / redirected).open()
    try:
        return subprocess.run(
            runnable(words), cwd=place, env=environment, stdin=source, capture_output=True, text=True, timeout=600
        )
    finally:
        if source is not None:
            source.close()


def runnable(words: list[str]) -> list[str]:
    """A command with its program replaced by the one of this environment."""
    programs = {
        "megalite": [sys.executable, "-m", "megalite"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
    }
    return [*programs.get(words[0], [words[0]]), *words[1:]]


def shortened(words: list[str]) -> list[str]:
    """A command with further options that keep it short."""
    if "--dry_run" in words or "megalite" not in words:
        return words
    return [*words, *shlex.split(SHORT.get(words[words.index("megalite") + 1], ""))]
