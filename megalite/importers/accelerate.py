"""Accelerate's default_config.yaml. Meanings and defaults are those of its commands/config/cluster.py,
config_args.py and utils/dataclasses.py."""

from __future__ import annotations

import math
from typing import Any

from megalite.config.errors import ConfigError
from megalite.importers import deepspeed
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    lost,
    never,
    only,
    sets,
    word,
)

NAME = "Accelerate"
PLUGIN, FSDP, SIZES = "deepspeed_config.", "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
DIMS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
MARK = "distributed_type"
LINKED = f"{PLUGIN}deepspeed_config_file"
MEGATRON = "megatron_lm_config.megatron_lm_"
TYPES = ("MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "NO", "FALSE")  # YAML reads an unquoted no as false
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
# by number, and FSDP2's reshard_after_forward
STRATEGIES |= {"1": 3, "2": 2, "3": 0, "4": 3, "5": 2, "TRUE": 3, "FALSE": 2}


def linked_file(source: ImportedFile) -> str | None:
    """The DeepSpeed file named by a configuration, or None."""
    return (
        str(source.get(LINKED))
        if source.word(MARK) == "DEEPSPEED" and source.word(LINKED) not in ("NONE", "")
        else None
    )


def recognizes(leaves: dict[str, Any]) -> bool:
    return MARK in leaves


def ranks(source: ImportedFile) -> int | None:
    """Number of data-parallel ranks: the ranks that read different rows. None if it is not known.

    Ranks of one tp, cp or sp group read the same rows. Raises ConfigError if the sizes of parallelism_config
    are not all processes, which Accelerate refuses too.
    """
    processes = source.size("num_processes")
    if source.word(MARK) == "MEGATRON_LM":
        replica = math.prod(source.size(f"{MEGATRON}{name}") or 1 for name in ("tp_degree", "pp_degree"))
        if processes and processes % replica:
            raise ConfigError(
                f"num_processes = {processes} is not a multiple of tp_degree * pp_degree = {replica}. "
                "Correct one of them."
            )
        return processes // replica if processes else source.dp
    if source.word(MARK) not in TYPES:
        return source.dp
    if not any(key.startswith(SIZES) for key in source.leaves):
        return processes or source.dp
    sizes = {name: source.size(f"{SIZES}{name}_size") or 1 for name in DIMS}
    total = math.prod(sizes.values())
    if processes and total not in (1, processes):
        product = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"num_processes = {processes} is not the product of parallelism_config: {product}. Correct one "
            "of them."
        )
    return processes if total == 1 else sizes["dp_replicate"] * sizes["dp_shard"]


def _type(value: Any, source: ImportedFile) -> Verdict:
    if word(value) == "MEGATRON_LM":
        return harmless("its section has the sizes")
    if word(value) not in TYPES:
        return lost("runs use CUDA GPUs or CPUs: set parallel.tp, pp, dp and zero")
    return (
        honoured({"parallel.zero": 0})
        if word(value).startswith("MULTI")
        else harmless("its section, if there is one, determines it")
    )


def _processes(value: Any, source: ImportedFile) -> Verdict:
    known = source.dp
    return (
        honoured({"parallel.dp": known})
        if known
        else lost("how many of them are data-parallel is not known: set parallel.dp")
    )


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    return harmless("it is so here") if value == 1 and not source.dp else _processes(value, source)


def _strategy(value: Any, source: ImportedFile) -> Verdict:
    """HYBRID shards within a machine and replicates over machines."""
    name, machines = word(value), source.size("num_machines") or 1
    if name not in STRATEGIES:
        return lost("it is no known strategy: set parallel.zero (3 is FULL_SHARD) and parallel.dp_shard")
    zero = {"parallel.zero": STRATEGIES[name]}
    if not name.startswith(("HYBRID", "4", "5")) or (source.dp and machines == 1):
        return honoured(zero)
    if source.dp is None or source.dp % machines:
        return honoured(
            zero, "this is only its ZeRO stage: set parallel.dp_shard to the number of ranks on one machine"
        )
    return honoured(zero | {"parallel.dp_shard": source.dp // machines})


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Its shards span cp as well; parallel.dp_shard counts all data ranks."""
    shards = value * (source.size(f"{SIZES}cp_size") or 1) if type(value) is int else value
    return honoured({"parallel.dp_shard": shards} | ({"parallel.dp": source.dp} if source.dp else {}))


def _context(value: Any, source: ImportedFile) -> Verdict:
    """Keys and values are gathered by default."""
    method = {"ALLTOALL": "ring"}.get(source.word(f"{SIZES}cp_comm_strategy"), "gather")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _microbatches(value: Any, source: ImportedFile) -> Verdict:
    """Microbatches of one rank in a step: accumulation steps, whether or not there is a pipeline."""
    return deepspeed.BATCH._replace(steps=f"{MEGATRON}num_micro_batches").accumulation(value, source)


def _offload(prefix: str) -> KeyRule:
    """FSDP updates parameters where they are stored: if they are offloaded, so is the optimizer state."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if word(value) not in ("TRUE", "FALSE"):
            return lost(deepspeed.BOOLEAN)
        if word(value) == "FALSE":
            return honoured({"parallel.offload": "none"})
        strategy = source.get(
            f"{prefix}reshard_after_forward", source.get(f"{prefix}sharding_strategy", "FULL_SHARD")
        )
        if STRATEGIES.get(word(strategy)) == 3:
            return honoured({"parallel.offload": "cpu", "parallel.offload_parameters": True})
        return honoured(
            {"parallel.offload": "cpu"},
            "only the optimizer state: weights are offloaded with parallel.zero: 3 only",
        )

    return KeyRule(judge, "parallel.offload")


def fsdp_rows(prefix: str) -> Table:
    """The rows of FSDP's own keys, which other projects take too."""
    return {
        **each(prefix, "sharding_strategy reshard_after_forward", KeyRule(_strategy, "parallel.zero")),
        f"{prefix}activation_checkpointing": sets(
            "train.recompute", {"TRUE": "full", "FALSE": "none"}, deepspeed.BOOLEAN
        ),
        f"{prefix}offload_params": _offload(prefix),
        f"{prefix}auto_wrap_policy": only(
            "TRANSFORMER_BASED_WRAP", "whole layers are gathered: parallel.bucket_mb is nearest"
        ),
        f"{prefix}min_num_params": only("", "whole layers are gathered: parallel.bucket_mb is nearest"),
        f"{prefix}transformer_layer_cls_to_wrap": never("whole layers are gathered, of any model"),
        **each(
            prefix,
            "backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers",
            never(deepspeed.GATHERING),
        ),
        **each(
            prefix,
            "state_dict_type final_state_dict_type sync_module_states cpu_ram_efficient_loading",
            never(deepspeed.WHOLE),
        ),
        **each(prefix, "use_orig_params version", never("it chooses FSDP's interface, not what is computed")),
    }


WITHIN = "it is how the ranks of one sequence communicate"
LAUNCH = (
    "it is for the launcher: torchrun's --nnodes, --node-rank and --rdzv-endpoint, and CUDA_VISIBLE_DEVICES"
)
TABLE: Table = {
    "compute_environment": only("LOCAL_MACHINE", "runs are started with torchrun"),
    MARK: KeyRule(_type, "parallel.zero"),
    "num_processes": KeyRule(_processes, "parallel.dp"),
    "mixed_precision": sets(
        "train.precision",
        {"NO": "fp32", "FALSE": "fp32", "FP16": "fp16", "BF16": "bf16"},
        "train.precision: bf16 is nearest",
    ),
    "downcast_bf16": only("NO FALSE", "it is for TPUs; train.precision: bf16 is nearest"),
    **fsdp_rows(FSDP),
    f"{PLUGIN}zero_stage": deepspeed.STAGE,
    f"{PLUGIN}gradient_clipping": deepspeed.TABLE["gradient_clipping"],
    f"{PLUGIN}gradient_accumulation_steps": deepspeed.TABLE["gradient_accumulation_steps"],
    f"{PLUGIN}offload_optimizer_device": deepspeed.OFFLOAD,
    f"{PLUGIN}offload_optimizer_nvme_path": deepspeed.nvme_path(f"{PLUGIN}offload_optimizer_device"),
    f"{PLUGIN}offload_param_device": deepspeed.offload_parameters(f"{PLUGIN}zero_stage", 2),
    f"{PLUGIN}offload_param_nvme_path": never("weights go to CPU memory, not to disk"),
    **each(PLUGIN, "zero3_init_flag zero3_save_16bit_model", never(deepspeed.WHOLE)),
    **each(
        PLUGIN,
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
        "deepspeed_exclusion_filter",
        never(LAUNCH),
    ),
    LINKED: only("NONE", "it is not read"),
    "dynamo_config.dynamo_backend": sets(
        "train.compile", {"INDUCTOR": True, "NO": False, "FALSE": False}, "train.compile uses inductor"
    ),
    "dynamo_config.*": only("FALSE DEFAULT", "train.compile has no further choices"),
    f"{SIZES}tp_size": sets("parallel.tp"),
    f"{SIZES}dp_shard_size": KeyRule(_shards, "parallel.dp_shard"),
    f"{SIZES}dp_replicate_size": KeyRule(_replicas, "parallel.dp"),
    f"{SIZES}cp_size": KeyRule(_context, "parallel.cp"),
    f"{SIZES}cp_comm_strategy": never("parallel.context is set for it, if there are ranks of a sequence"),
    f"{MEGATRON}tp_degree": sets("parallel.tp"),
    f"{MEGATRON}pp_degree": sets("parallel.pp"),
    f"{MEGATRON}num_micro_batches": KeyRule(_microbatches, "train.global_batch_size"),
    f"{MEGATRON}sequence_parallelism": sets("parallel.sequence_parallel"),
    f"{MEGATRON}recompute_activations": sets(
        "train.recompute", {"TRUE": "selective", "FALSE": "none"}, deepspeed.BOOLEAN
    ),
    f"{MEGATRON}use_distributed_optimizer": sets("parallel.zero", {"TRUE": 1, "FALSE": 0}, deepspeed.BOOLEAN),
    f"{MEGATRON}gradient_clipping": deepspeed.TABLE["gradient_clipping"],
    "fp8_config.*": never("mixed_precision decides whether it is used; there is no float8 here"),
    f"{SIZES}sp_size": only(
        "1",
        "the ranks of one sequence are left out, the batch is the same: parallel.sequence_parallel is "
        "nearest",
    ),
    **each(
        SIZES,
        "cp_backend sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
        never(WITHIN),
    ),
    **each(
        "",
        "gradient_accumulation_steps fsdp_config.gradient_accumulation_steps",
        deepspeed.TABLE["gradient_accumulation_steps"],
    ),
    "use_cpu": only(
        "FALSE", "a run uses the GPUs that it sees: hide them with CUDA_VISIBLE_DEVICES= (empty)"
    ),
    **each(
        "",
        "num_machines machine_rank main_process_ip main_process_port rdzv_backend same_network gpu_ids",
        never(LAUNCH),
    ),
    **each(
        "", "main_training_function enable_cpu_affinity debug", never("it concerns Accelerate's own start")
    ),
    **each("", "tpu_use_cluster tpu_use_sudo", only("FALSE", "there are no TPUs here", "it is off")),
}


def table(source: ImportedFile) -> Table:
    """The rows for this file's keys: a section is read only under its own distributed_type, and a named
    DeepSpeed file replaces the other keys of its section."""
    rows = dict(TABLE)
    for key in source.leaves:
        for section, kind in (
            (PLUGIN, "DEEPSPEED"),
            ("fsdp_config.", "FSDP"),
            ("megatron_lm_config.", "MEGATRON_LM"),
        ):
            if key.startswith(section) and source.word(MARK) != kind:
                rows[key] = never(f"Accelerate reads it under distributed_type {kind} only")
            elif key.startswith(PLUGIN) and linked_file(source):
                rows[key] = never("the DeepSpeed file named by deepspeed_config_file replaces it")
    if linked_file(source) and source.word("mixed_precision") in ("NO", "FALSE"):
        rows["mixed_precision"] = never("the DeepSpeed file named by deepspeed_config_file replaces it")
    return rows


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Accelerate's default sharding, for keys that the file does not have."""
    kind = source.word(MARK)
    if kind == "FSDP" and f"{FSDP}reshard_after_forward" not in source.leaves:
        return {f"{FSDP}sharding_strategy": "FULL_SHARD"}
    return {f"{PLUGIN}zero_stage": 2} if kind == "DEEPSPEED" and not linked_file(source) else {}
