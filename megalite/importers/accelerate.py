"""Accelerate's default_config.yaml.

Meanings and defaults are those of its commands/config/cluster.py, config_args.py and utils/dataclasses.py.
"""

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
    """Return the DeepSpeed file named by a configuration, or None."""
    return (
        str(source.get(LINKED))
        if source.word(MARK) == "DEEPSPEED" and source.word(LINKED) not in ("NONE", "")
        else None
    )


def recognizes(leaves: dict[str, Any]) -> bool:
    return MARK in leaves


def ranks(source: ImportedFile) -> int | None:
    """Return the number of data-parallel ranks: the ranks that read different rows. None if it is not known.

    Ranks of one tp, cp or sp group read the same rows. Raises ConfigError if the sizes of parallelism_config
    are not all processes, which Accelerate refuses too.
    """
    processes = source.size("num_processes")
    if source.word(MARK) == "MEGATRON_LM":
        replica = math.prod(source.size(f"{MEGATRON}{name}") or 1 for name in ("tp_degree", "pp_degree"))
        if processes and processes % replica:
            raise ConfigError(
                f"num_processes={processes} must be a multiple of tp_degree * pp_degree = {replica}. "
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
            f"num_processes={processes} does not match parallelism_config: {product}. Correct one of them."
        )
    return processes if total == 1 else sizes["dp_replicate"] * sizes["dp_shard"]


def _type(value: Any, source: ImportedFile) -> Verdict:
    if word(value) == "MEGATRON_LM":
        return harmless("the sizes are taken from its section")
    if word(value) not in TYPES:
        return lost("only CUDA GPUs and CPUs are supported: set parallel.tp, pp, dp and zero")
    return (
        honoured({"parallel.zero": 0})
        if word(value).startswith("MULTI")
        else harmless("determined by its section, if present")
    )


def _processes(value: Any, source: ImportedFile) -> Verdict:
    known = source.dp
    return (
        honoured({"parallel.dp": known})
        if known
        else lost("the number of data-parallel ranks is unknown: set parallel.dp")
    )


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    return harmless("this is always the case") if value == 1 and not source.dp else _processes(value, source)


def _strategy(value: Any, source: ImportedFile) -> Verdict:
    """Map the sharding strategy. HYBRID shards within a machine and replicates across machines."""
    name, machines = word(value), source.size("num_machines") or 1
    if name not in STRATEGIES:
        return lost("unknown strategy: set parallel.zero (3 for FULL_SHARD) and parallel.dp_shard")
    zero = {"parallel.zero": STRATEGIES[name]}
    if not name.startswith(("HYBRID", "4", "5")) or (source.dp and machines == 1):
        return honoured(zero)
    if source.dp is None or source.dp % machines:
        return honoured(
            zero, "only the ZeRO stage is imported: set parallel.dp_shard to the number of ranks per machine"
        )
    return honoured(zero | {"parallel.dp_shard": source.dp // machines})


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Map the shard size. Shards also span cp, and parallel.dp_shard counts all data ranks."""
    shards = value * (source.size(f"{SIZES}cp_size") or 1) if type(value) is int else value
    return honoured({"parallel.dp_shard": shards} | ({"parallel.dp": source.dp} if source.dp else {}))


def _context(value: Any, source: ImportedFile) -> Verdict:
    """Map the method of context parallelism, which gathers keys and values by default."""
    method = {"ALLTOALL": "ring"}.get(source.word(f"{SIZES}cp_comm_strategy"), "gather")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _microbatches(value: Any, source: ImportedFile) -> Verdict:
    """Return the microbatches per rank and step: the accumulation steps, with and without a pipeline."""
    return deepspeed.BATCH._replace(steps=f"{MEGATRON}num_micro_batches").accumulation(value, source)


def _offload(prefix: str) -> KeyRule:
    """Map offloading. FSDP offloads the optimizer state together with the parameters."""

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
            "only the optimizer state is offloaded: offloading weights requires parallel.zero: 3",
        )

    return KeyRule(judge, "parallel.offload")


def fsdp_rows(prefix: str) -> Table:
    """Return the rows of FSDP's own keys, which other projects take too."""
    return {
        **each(prefix, "sharding_strategy reshard_after_forward", KeyRule(_strategy, "parallel.zero")),
        f"{prefix}activation_checkpointing": sets(
            "train.recompute", {"TRUE": "full", "FALSE": "none"}, deepspeed.BOOLEAN
        ),
        f"{prefix}offload_params": _offload(prefix),
        f"{prefix}auto_wrap_policy": only(
            "TRANSFORMER_BASED_WRAP",
            "layers are always gathered as a whole: the closest option is parallel.bucket_mb",
        ),
        f"{prefix}min_num_params": only(
            "", "layers are always gathered as a whole: the closest option is parallel.bucket_mb"
        ),
        f"{prefix}transformer_layer_cls_to_wrap": never("layers of every model are gathered as a whole"),
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
        **each(prefix, "use_orig_params version", never("only selects the FSDP API")),
    }


WITHIN = "only affects how context-parallel ranks communicate"
LAUNCH = "launcher option: use torchrun's --nnodes, --node-rank and --rdzv-endpoint, and CUDA_VISIBLE_DEVICES"
TABLE: Table = {
    "compute_environment": only("LOCAL_MACHINE", "use torchrun to launch runs"),
    MARK: KeyRule(_type, "parallel.zero"),
    "num_processes": KeyRule(_processes, "parallel.dp"),
    "mixed_precision": sets(
        "train.precision",
        {"NO": "fp32", "FALSE": "fp32", "FP16": "fp16", "BF16": "bf16"},
        "the closest option is train.precision: bf16",
    ),
    "downcast_bf16": only("NO FALSE", "only applies to TPUs; the closest option is train.precision: bf16"),
    **fsdp_rows(FSDP),
    f"{PLUGIN}zero_stage": deepspeed.STAGE,
    f"{PLUGIN}gradient_clipping": deepspeed.TABLE["gradient_clipping"],
    f"{PLUGIN}gradient_accumulation_steps": deepspeed.TABLE["gradient_accumulation_steps"],
    f"{PLUGIN}offload_optimizer_device": deepspeed.OFFLOAD,
    f"{PLUGIN}offload_optimizer_nvme_path": deepspeed.nvme_path(f"{PLUGIN}offload_optimizer_device"),
    f"{PLUGIN}offload_param_device": deepspeed.offload_parameters(f"{PLUGIN}zero_stage", 2),
    f"{PLUGIN}offload_param_nvme_path": never("weights can be offloaded to CPU memory, but not to disk"),
    **each(PLUGIN, "zero3_init_flag zero3_save_16bit_model", never(deepspeed.WHOLE)),
    **each(
        PLUGIN,
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
        "deepspeed_exclusion_filter",
        never(LAUNCH),
    ),
    LINKED: only("NONE", "not used"),
    "dynamo_config.dynamo_backend": sets(
        "train.compile", {"INDUCTOR": True, "NO": False, "FALSE": False}, "train.compile always uses inductor"
    ),
    "dynamo_config.*": only("FALSE DEFAULT", "train.compile has no further options"),
    f"{SIZES}tp_size": sets("parallel.tp"),
    f"{SIZES}dp_shard_size": KeyRule(_shards, "parallel.dp_shard"),
    f"{SIZES}dp_replicate_size": KeyRule(_replicas, "parallel.dp"),
    f"{SIZES}cp_size": KeyRule(_context, "parallel.cp"),
    f"{SIZES}cp_comm_strategy": never("parallel.context is set instead if context parallelism is used"),
    f"{MEGATRON}tp_degree": sets("parallel.tp"),
    f"{MEGATRON}pp_degree": sets("parallel.pp"),
    f"{MEGATRON}num_micro_batches": KeyRule(_microbatches, "train.global_batch_size"),
    f"{MEGATRON}sequence_parallelism": sets("parallel.sequence_parallel"),
    f"{MEGATRON}recompute_activations": sets(
        "train.recompute", {"TRUE": "selective", "FALSE": "none"}, deepspeed.BOOLEAN
    ),
    f"{MEGATRON}use_distributed_optimizer": sets("parallel.zero", {"TRUE": 1, "FALSE": 0}, deepspeed.BOOLEAN),
    f"{MEGATRON}gradient_clipping": deepspeed.TABLE["gradient_clipping"],
    "fp8_config.*": never("only used if mixed_precision selects it; float8 is not supported"),
    f"{SIZES}sp_size": only(
        "1",
        "imported without sequence parallelism, with the same batch: the closest option is "
        "parallel.sequence_parallel",
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
    "use_cpu": only("FALSE", "a run uses all visible GPUs: set CUDA_VISIBLE_DEVICES= (empty) to hide them"),
    **each(
        "",
        "num_machines machine_rank main_process_ip main_process_port rdzv_backend same_network gpu_ids",
        never(LAUNCH),
    ),
    **each(
        "", "main_training_function enable_cpu_affinity debug", never("only affects Accelerate's launcher")
    ),
    **each("", "tpu_use_cluster tpu_use_sudo", only("FALSE", "TPUs are not supported", "disabled")),
}


def table(source: ImportedFile) -> Table:
    """Return the rows for this file's keys.

    A section is read only under its own distributed_type, and a named DeepSpeed file replaces the other keys
    of its section.
    """
    rows = dict(TABLE)
    for key in source.leaves:
        for section, kind in (
            (PLUGIN, "DEEPSPEED"),
            ("fsdp_config.", "FSDP"),
            ("megatron_lm_config.", "MEGATRON_LM"),
        ):
            if key.startswith(section) and source.word(MARK) != kind:
                rows[key] = never(f"only used with distributed_type {kind}")
            elif key.startswith(PLUGIN) and linked_file(source):
                rows[key] = never("overridden by deepspeed_config_file")
    if linked_file(source) and source.word("mixed_precision") in ("NO", "FALSE"):
        rows["mixed_precision"] = never("overridden by deepspeed_config_file")
    return rows


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return Accelerate's default sharding for missing keys."""
    kind = source.word(MARK)
    if kind == "FSDP" and f"{FSDP}reshard_after_forward" not in source.leaves:
        return {f"{FSDP}sharding_strategy": "FULL_SHARD"}
    return {f"{PLUGIN}zero_stage": 2} if kind == "DEEPSPEED" and not linked_file(source) else {}
