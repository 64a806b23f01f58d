"""Import and export Hugging Face models and checkpoints of Megatron-LM, and check that both sides of the
former compute the same logits.

    megalite convert import HF_DIR CHECKPOINT_DIR [--drop_mtp]
    megalite convert import megatron:DIR CHECKPOINT_DIR [--weights_only]   or torchtitan:DIR, dcp:DIR
    megalite convert export CHECKPOINT_DIR HF_DIR [--dtype bfloat16] [--like HF_DIR] [--shard_size 5GB]
        [--ema] [--base HF_DIR] [--evaluate N]
    megalite convert export CHECKPOINT_DIR DIR --format megatron [--weights_only]   or megatron-legacy
    megalite convert export CHECKPOINT_DIR FILE.gguf --format gguf [--dtype bf16] [--pre NAME]
    megalite convert adapter-export CHECKPOINT_DIR PEFT_DIR [--base HF_DIR]
    megalite convert loftq HF_DIR DIR --rank 16 [--alpha 16] [--iterations 4]
    megalite convert check DIR [HF_DIR] [--text TEXT …]   exit status 1 if the logits differ
    megalite convert check DIR [HF_DIR] --train_steps 1 [--dtype float64]   also loss, gradients and weights

A run's directory or configuration means its newest checkpoint; an HF_DIR that is read may be org/name on the
Hugging Face Hub. Adapters are exported merged into the weights, or alone. Features that our model cannot
compute are rejected by name before anything is written, and output directories are renamed into place only
when complete.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import CheckpointError, Manifest, find, manifest_of
from megalite.checkpoint.directories import check_free
from megalite.commands.models import HF, add_base_option, base_named, config_of, hf_directory, weights_of
from megalite.commands.parser import (
    Answer,
    Parser,
    answer,
    as_name,
    as_output,
    as_tokenizer,
    positive,
    progress_of,
)
from megalite.config.amounts import byte_size
from megalite.config.errors import ConfigError
from megalite.config.rule import OTHER_PROGRAMS
from megalite.data.indexed import DataError
from megalite.families.model_config import families
from megalite.system.messages import counted

if TYPE_CHECKING:
    from megalite.evaluation.logits import LogitComparison
    from megalite.system.progress import Report

TOLERANCE = 1e-4
ROW = 8  # positions per line
"""How names of other programs' checkpoints begin."""
MEGATRON: dict[str, Any] = {"megatron": "torch_dist", "megatron-legacy": "legacy"}
RANKS = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "virtual_stages": "virtual stages of each pipeline rank",
    "ep": "expert-parallel ranks",
}
SHARD_SIZE = "5GB"
LORA_ALPHA = 16.0
SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
NO_SUSPECT = "no part of the forward differs on the same input by more than rounding"


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    options = tool.parse_args(argv)
    commands = {"import": bring_in, "export": bring_out, "adapter-export": bring_adapter_out}
    commands |= {"loftq": write_start, "check": check}
    return answer(tool, options, commands, CheckpointError, ConfigError, DataError)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    commands = tool.add_subparsers(
        dest="command", required=True, metavar="import|export|adapter-export|loftq|check"
    )

    def command(name: str, description: str, first: str, second: str) -> Callable[..., Any]:
        added = commands.add_parser(name, parents=[common], help=description)
        added.add_argument(first.lower(), type=as_name, metavar=first)
        if name == "check":
            added.add_argument(second.lower(), type=as_name, nargs="?", metavar=second)
        else:
            added.add_argument(second.lower(), type=as_output, metavar=second)
        return added.add_argument

    add = command(
        "import",
        "convert a Hugging Face directory, or another program's checkpoint, to a checkpoint",
        "HF_DIR",
        "CHECKPOINT_DIR",
    )
    _add_import_options(add)
    add = command(
        "export",
        "convert a checkpoint to a Hugging Face directory, or to a GGUF file for llama.cpp",
        "CHECKPOINT_DIR",
        "HF_DIR",
    )
    _add_export_options(add)
    add = command(
        "adapter-export",
        "convert the adapters (LoRA) of a checkpoint to a PEFT directory",
        "CHECKPOINT_DIR",
        "PEFT_DIR",
    )
    add_base_option(add)
    add = command(
        "loftq",
        "quantize a Hugging Face directory to nf4, with adapters that make up for what this loses (LoftQ)",
        "HF_DIR",
        "OUT_DIR",
    )
    add("--rank", type=positive, required=True, help="rank of the adapters, as lora.rank")
    add("--alpha", type=float, default=LORA_ALPHA, help="as lora.alpha (default 16)")
    add("--iterations", type=positive, default=4, help="of quantization and decomposition (default 4)")
    add = command(
        "check",
        "compare logits, and optionally training steps, with transformers; exit status 1 if they differ",
        "DIR",
        "HF_DIR",
    )
    _add_check_options(add)
    return tool


def _add_import_options(add: Callable[..., Any]) -> None:
    add(
        "--weights_only",
        action="store_true",
        help="leave out the state of the optimizer of megatron:DIR and torchtitan:DIR",
    )
    add(
        "--model",
        type=as_name,
        metavar="MODEL",
        help="model of megatron:DIR or torchtitan:DIR, if the checkpoint does not describe it: a preset, a "
        "configuration or config.json",
    )
    add(
        "--drop_padding",
        action="store_true",
        help="leave out the rows of megatron:DIR beyond the vocabulary of the tokenizer",
    )
    add(
        "--drop_mtp",
        action="store_true",
        help="skip the multi-token prediction modules (num_nextn_predict_layers)",
    )


def _add_export_options(add: Callable[..., Any]) -> None:
    add(
        "--format",
        choices=["huggingface", "gguf", *MEGATRON],
        default="huggingface",
        help="huggingface: a directory as transformers writes it, which vLLM and SGLang load; gguf: one file "
        "for llama.cpp and Ollama, at the path HF_DIR; megatron: torch_dist of Megatron-LM; megatron-legacy: "
        "a file for each of its ranks (default huggingface)",
    )
    add(
        "--pre",
        metavar="NAME",
        help="with --format gguf, llama.cpp's name of the tokenizer's pre-tokenizer, such as llama-bpe "
        "(default: found by its rules)",
    )
    add(
        "--weights_only",
        action="store_true",
        help="leave out the state of the optimizer, which --format megatron writes if the checkpoint has it",
    )
    for axis, what in RANKS.items():
        add(
            f"--{axis}",
            type=positive,
            metavar="N",
            help=f"{what} of megatron-legacy (default: 1; without any of them, that of the import)",
        )
    add(
        "--like",
        type=as_name,
        metavar="HF_DIR",
        help="source of the tokenizer, token ids and generation settings (default: the directory the "
        "model was imported from)",
    )
    add(
        "--tokenizer",
        type=as_tokenizer,
        metavar="byte|FILE.model|HF_DIR",
        help="tokenizer (default: from the training data, else from --like)",
    )
    add(
        "--allow_tokenizer_change",
        action="store_true",
        help="accept a tokenizer that differs from the one used in training",
    )
    add(
        "--family",
        choices=list(families().rows),
        help="target family (default: the family of the imported model, or the first that fits)",
    )
    add(
        "--dtype",
        type=lambda name: SHORT.get(name, name),
        choices=["float32", "bfloat16", "float16", "fp8", "nf4"],
        help="dtype of the tensors, except those that transformers keeps in fp32 (default: as stored), also "
        "as f32, bf16 or f16; fp8: matrices of layers with a scale per block of 128 x 128, nf4: in 4 bits "
        "as bitsandbytes; all others in bfloat16",
    )
    add(
        "--evaluate",
        type=positive,
        metavar="N",
        help="also compute the loss of the checkpoint and of the export on N rows of the run's validation "
        "data, in fp32 in this process; with fp8 and nf4 also of the weights in bfloat16 (default: none)",
    )
    add(
        "--ema",
        action="store_true",
        help="export the moving average of the weights (train.ema_decay) instead of the weights",
    )
    add(
        "--shard_size",
        type=size,
        metavar="SIZE",
        help=f"maximum bytes per file of safetensors, for example 500MB (default {SHARD_SIZE})",
    )
    add_base_option(add)


def _add_check_options(add: Callable[..., Any]) -> None:
    add(
        "--text",
        action="append",
        default=[],
        help="also compare on this text, using the tokenizer in HF_DIR, and train on it; may be repeated",
    )
    add("--tokens", type=positive, default=64, help="random tokens per row (default 64)")
    add("--rows", type=positive, default=2, help="number of rows of random tokens (default 2)")
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"maximum difference between logits (default {TOLERANCE:g})",
    )
    add(
        "--train_steps",
        type=positive,
        metavar="N",
        help="also train for N steps of AdamW on both sides, and compare the losses, the gradient of every "
        "tensor and every tensor after the steps (default: compare logits only)",
    )
    add(
        "--dtype",
        choices=["float32", "float64"],
        help="dtype of the weights and arithmetic of --train_steps (default float32)",
    )
    add_base_option(add)


def size(text: str) -> int:
    """Parse a size in bytes: 500MB, 5GB, 2GiB or a plain number."""
    number = byte_size(text) or 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return number


def start_copying() -> None:
    from megalite.launch.process import configure_cpu

    configure_cpu()  # blocks reuse memory, which halves the time of an export


def bring_in(options: argparse.Namespace) -> Answer:
    if options.hf_dir.startswith(OTHER_PROGRAMS):
        return _bring_other_in(options)
    both = "megatron:DIR and torchtitan:DIR"
    for name, of in (("weights_only", both), ("model", both), ("drop_padding", "megatron:DIR")):
        if getattr(options, name):
            raise ConfigError(f"--{name} applies to {of} only. Leave it out.")
    source = hf_directory(options.hf_dir, "weights", "HF_DIR")
    check_free(options.checkpoint_dir)
    from megalite.huggingface.convert import import_model

    start_copying()
    with progress_of(options.json) as progress:
        content = import_model(source, options.checkpoint_dir, progress, mtp=not options.drop_mtp)
    return _written(content, str(options.checkpoint_dir))


def _bring_other_in(options: argparse.Namespace) -> Answer:
    check_free(options.checkpoint_dir)
    given = None if options.model is None else config_of(options.model, 1, precision=None)
    from megalite.interchange.import_state import import_source
    from megalite.interchange.sources import open_source

    start_copying()
    kept = {"weights_only": options.weights_only, "drop_padding": options.drop_padding}
    with progress_of(options.json) as progress:
        source = open_source(options.hf_dir, given, drop_mtp=options.drop_mtp, **kept)
        content = import_source(source, options.checkpoint_dir, progress)
    return _written_state(content, str(options.checkpoint_dir))


def _bring_megatron_out(options: argparse.Namespace) -> Answer:
    source, target = checkpoint_of(options), options.hf_dir
    check_free(target)
    unused: dict[str, Any] = {
        "like": None,
        "tokenizer": None,
        "family": None,
        "pre": None,
        "shard_size": None,
    }
    unused |= {"allow_tokenizer_change": False, "shard_size": None, "evaluate": None, "base": None}
    for name, default in unused.items():
        if getattr(options, name) != default:
            raise ConfigError(f"--{name} does not apply to --format {options.format}. Leave it out.")
    if options.dtype in ("fp8", "nf4"):
        raise ConfigError(
            f"--dtype {options.dtype} applies to --format huggingface only. Choose float32 or bfloat16."
        )
    import torch

    from megalite.interchange.export_plan import LegacyLayout
    from megalite.interchange.megatron_export import check_layout, export_megatron

    given = {axis: size for axis in RANKS if (size := getattr(options, axis)) is not None}
    layout = LegacyLayout(**given) if given else None
    form = MEGATRON[options.format]
    check_layout(layout or LegacyLayout(), form)
    start_copying()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with progress_of(options.json) as progress:
        content = export_megatron(
            manifest_of(source).averaged() if options.ema else source,
            target,
            form,
            layout=layout,
            dtype=dtype,
            weights_only=options.weights_only or options.ema,
            progress=progress,
        )
    return _written_state(content, str(target))


def _written_state(content: dict[str, Any], place: str) -> Answer:
    state = (
        f", with the state of the optimizer after step {content['step']:,}" if content["optimizer"] else ""
    )
    content, lines, status = _written(content, place)
    return content, [lines[0] + state, *lines[1:]], status


def bring_out(options: argparse.Namespace) -> Answer:
    if options.format in MEGATRON:
        return _bring_megatron_out(options)
    for name in ("weights_only", *RANKS):
        if getattr(options, name):
            raise ConfigError(
                f"--{name} applies to --format megatron and megatron-legacy only. Leave it out."
            )
    source, target = checkpoint_of(options), options.hf_dir
    like = None if options.like is None else hf_directory(options.like, "tokenizer", "--like")
    _check_gguf(options)
    check_free(target)
    import torch

    from megalite.huggingface.base_weights import moved

    start_copying()
    dtype = options.dtype if options.dtype in (None, "fp8", "nf4") else getattr(torch, options.dtype)
    requested = {"like": like, "family": options.family, "dtype": dtype}
    requested |= {"tokenizer": options.tokenizer, "allow_tokenizer_change": options.allow_tokenizer_change}
    manifest = manifest_of(source).averaged() if options.ema else manifest_of(source)
    manifest = moved(manifest, base_named(options.base))
    with progress_of(options.json) as progress:
        if options.format == "gguf":
            from megalite.gguf.export import export_gguf

            content = export_gguf(manifest, target, **requested, pre=options.pre, progress=progress)
        else:
            content = _written_directory(options, source, manifest, requested, progress)
    return _written(content, str(options.hf_dir))


class ExportLosses:
    """ExportLosses of a checkpoint and of its exports on rows of the run's validation data (--evaluate).

    Raises ConfigError if there are no such rows.
    """

    def __init__(self, options: argparse.Namespace, source: Path, manifest: Manifest):
        from megalite.config.load import from_dict
        from megalite.evaluation.held_out_loss import validation_sets
        from megalite.generation.sources import open_source

        self.rows, self.known = options.evaluate, dict[str, float]()
        self.config = from_dict(manifest.state["config"])
        if self.config.model.output_head != "vocabulary":
            raise ConfigError(
                f"--evaluate {self.rows} computes the loss of the next words, and {source} has the head of a "
                "reward model. Leave --evaluate out."
            )
        self.sets = validation_sets(self.config, "--evaluate")
        self._checkpoint = open_source(source, options.ema, base_named(options.base))

    def add(self, what: str, name: str, progress: Report) -> None:
        """Compute the loss of an export; before the first one, that of the checkpoint."""
        from megalite.evaluation.held_out_loss import held_out_loss
        from megalite.generation.sources import open_source

        base = self.config.lora.base
        first = "of the checkpoint" if base == "none" else f"of the adapters over their base ({base})"
        sources = {} if self.known else {first: self._checkpoint}
        for label, source in (sources | {what: open_source(name)}).items():
            self.known[label] = held_out_loss(source, self.config, self.sets, self.rows, progress)

    @property
    def line(self) -> str:
        listed = ", ".join(f"{loss:.4f} {what}" for what, loss in self.known.items())
        return f"loss on {counted(self.rows, 'row')} of the run's validation data: {listed}"


def _check_gguf(options: argparse.Namespace) -> None:
    """Raise ConfigError if options do not fit --format gguf, or need it."""
    gguf = options.format == "gguf"
    if gguf and options.dtype in ("fp8", "nf4"):
        raise ConfigError(
            f"--format gguf has no dtype {options.dtype}. Legal values: float32, bfloat16 and float16. "
            "llama.cpp's llama-quantize writes quantized files from these."
        )
    if options.pre is not None and not gguf:
        raise ConfigError(f"--pre {options.pre} has no meaning without --format gguf. Omit it.")
    if options.shard_size is not None and gguf:
        raise ConfigError("--shard_size has no meaning with --format gguf, which writes one file. Omit it.")
    if options.evaluate is not None and gguf:
        raise ConfigError(
            f"--evaluate {options.evaluate} has no meaning with --format gguf, which is not read. Omit it."
        )


def _written_directory(
    options: argparse.Namespace, source: Path, manifest: Manifest, requested: dict[str, Any], progress: Report
) -> dict[str, Any]:
    """Write a Hugging Face directory, and compute the losses that --evaluate asks for."""
    import torch

    from megalite.huggingface.convert import export_model

    requested["shard"] = options.shard_size or size(SHARD_SIZE)
    target = options.hf_dir
    losses = None if options.evaluate is None else ExportLosses(options, source, manifest)
    content = export_model(manifest, target, **requested, progress=progress)
    if losses is not None:
        if options.dtype in ("fp8", "nf4"):
            with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
                merged = Path(place) / "bfloat16"
                export_model(manifest, merged, **requested | {"dtype": torch.bfloat16}, progress=progress)
                losses.add("exported in bfloat16", f"{HF}{merged}", progress)
        losses.add(f"exported in {content['dtypes'][0]}", f"{HF}{target}", progress)
        content |= {"losses": losses.known, "notes": [*content["notes"], losses.line]}
    return content


def bring_adapter_out(options: argparse.Namespace) -> Answer:
    source, target = checkpoint_of(options), options.peft_dir
    check_free(target)
    from megalite.huggingface.adapter_export import export_adapter
    from megalite.huggingface.base_weights import moved

    start_copying()
    manifest = moved(manifest_of(source), base_named(options.base))
    with progress_of(options.json) as progress:
        progress("exporting the adapters")
        content = export_adapter(manifest, target)
    text = "a PEFT adapter of rank {rank}, {parameters:,} parameters in {dtypes[0]}".format(**content)
    lines = [f"{options.peft_dir}: {text} for {len(content['modules'])} modules", *content["notes"]]
    return content | {"written": str(options.peft_dir)}, lines, 0


def write_start(options: argparse.Namespace) -> Answer:
    source, target = hf_directory(options.hf_dir, "weights", "HF_DIR"), options.out_dir
    if not options.alpha > 0:
        raise ConfigError(f"--alpha {options.alpha:g} is not positive. The default is {LORA_ALPHA:g}.")
    check_free(target)
    from megalite.huggingface.loftq_directories import write_loftq

    start_copying()
    with progress_of(options.json) as progress:
        content = write_loftq(source, target, options.rank, options.alpha, options.iterations, progress)
    given = f"--lora.rank {options.rank} --lora.alpha {options.alpha:g}"
    lines = [
        "{base}: a base in nf4, which differs from {matrices} matrices by {lost:.1%} (rms)".format(**content),
        "{adapter}: a PEFT adapter, with which they differ by {left:.1%}".format(**content),
        f"train it with --model.from_hf {content['base']} --model.init_from hf:{content['base']} "
        f"--lora.base nf4 {given} --lora.init_from {content['adapter']}",
    ]
    return content, lines, 0


def checkpoint_of(options: argparse.Namespace) -> Path:
    """Return the checkpoint that CHECKPOINT_DIR names."""
    return find(Path(weights_of(options.checkpoint_dir, "CHECKPOINT_DIR")))


def _written(content: dict[str, Any], place: str) -> Answer:
    line = (
        f"{place}: a {content['family']} model of {content['parameters']:,} parameters in "
        f"{', '.join(content['dtypes'])}"
    )
    with_tokenizer = f", with the tokenizer {content['tokenizer']}" if content.get("tokenizer") else ""
    return content | {"written": place}, [line + with_tokenizer, *content.get("notes", ())], 0


def check(options: argparse.Namespace) -> Answer:
    if options.dtype is not None and options.train_steps is None:
        raise ConfigError(
            "--dtype is the dtype of the training steps. Set --train_steps too, for example to 1."
        )
    name = weights_of(options.dir, "DIR")
    if options.hf_dir is None and not name.startswith(HF):
        raise ConfigError(
            f"{options.dir} is not a Hugging Face directory. Pass the one to compare it with as HF_DIR."
        )
    theirs = hf_directory(options.hf_dir or options.dir, "weights", "HF_DIR")
    from megalite.evaluation.first_difference import first_difference
    from megalite.evaluation.logits import compare, rounding
    from megalite.generation.sources import open_source

    start_copying()
    source, dtype = open_source(name, base=base_named(options.base)), options.dtype or "float32"
    if options.train_steps is not None and source.config.model.mup is not None:
        raise ConfigError(
            f"--train_steps {options.train_steps} compares with a model without model.mup, which {name} was "
            "trained with: its rates and factors differ. Check the export itself, hf:DIR, or leave it out."
        )
    inputs = {"texts": options.text, "tokens": options.tokens, "rows": options.rows}
    with progress_of(options.json) as progress:
        differences = compare(source, theirs, **inputs, progress=progress)
        content, lines, equal = _of_logits(differences, options.tolerance)
        suspect = None
        if options.train_steps is not None:
            from megalite.training.step_comparison import compare_steps

            requested = inputs | {"steps": options.train_steps, "dtype": dtype}
            steps = compare_steps(source, theirs, **requested, progress=progress)
            content, equal = content | {"training": steps.as_json()}, equal and steps.equal
            lines, suspect = lines + steps.lines(), steps.converted_wrongly
        if equal:
            return content, lines, 0
        if why := rounding(source, theirs):
            return content | {"equal": False}, [*lines, why], 1
        if suspect is None:
            suspect = first_difference(source, theirs, **inputs, dtype=dtype, progress=progress)
    lines.append(NO_SUSPECT if suspect is None else suspect.line)
    return content | {"equal": False, "suspect": suspect and asdict(suspect)}, lines, 1


def _of_logits(
    differences: Sequence[LogitComparison], tolerance: float
) -> tuple[dict[str, Any], list[str], bool]:
    """Return the content for --json, the lines to print, and whether the logits are equal."""
    equal = all(difference.maximum <= tolerance for difference in differences)
    lines = []
    for difference in differences:
        lines.append(
            f"{difference.name}: logits differ by at most {difference.maximum:.2e} (the largest is "
            f"{difference.largest:.3g}); position by position:"
        )
        for start in range(0, len(difference.worst), ROW):
            lines.append(
                f"  {start:5}  "
                + " ".join(f"{value:8.1e}" for value in difference.worst[start : start + ROW])
            )
    lines.append(f"{'equal' if equal else 'NOT equal'} within {tolerance:g}")
    inputs = [
        {
            "input": difference.name,
            "worst": difference.worst,
            "maximum": difference.maximum,
            "largest_logit": difference.largest,
        }
        for difference in differences
    ]
    return {"equal": equal, "tolerance": tolerance, "inputs": inputs}, lines, equal
