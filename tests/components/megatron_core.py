"""Runs in the environment "megatron": writes checkpoints with megatron-core, and reads them again.

    megatron_core.py write CASES.json OUT       on 4 ranks: both formats of every case, and logits
    megatron_core.py read CASES.json DIR OUT    on 1 rank: logits of DIR/NAME in torch_dist format

megatron-core expects a GPU. Some functions are replaced, so that models of its local layer specification and
its distributed optimizer compute on a CPU. Its other optimizers do not: state of AdamW with given moments is
stored through its functions for that (`dist_checkpointing.optimizer`, `optimizer._get_param_groups`). The
same state is then given to the distributed optimizer, which stores it in its own formats.
"""

import contextlib
import json
import os
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *arguments, **options: None
torch.Tensor.cuda = lambda self, *arguments, **options: self
_tensor, _type = torch.tensor, torch.Tensor.type
torch.tensor = lambda *arguments, device=None, **options: _tensor(*arguments, **options)
torch.Tensor.type = lambda self, *to: _type(self, *to) if to else _type(self).replace("torch.", "torch.cuda.")

from megatron.core import dist_checkpointing, mpu  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import (  # noqa: E402
    OptimizerConfig,
    _get_param_groups,
    get_megatron_optimizer,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)

_core_attention = DotProductAttention.__init__
DotProductAttention.__init__ = (  # latent attention passes widths, which follow from kv_channels here
    lambda self, *arguments, k_channels=None, v_channels=None, **options: _core_attention(self, *arguments, **options)
)
for _name in ("TELinear", "TEColumnParallelLinear", "Linear"):  # mocks without Transformer Engine
    if not isinstance(getattr(multi_latent_attention, _name), type):
        setattr(multi_latent_attention, _name, type(_name, (), {}))
moe_utils.te_general_gemm = None  # its name is not defined without Transformer Engine
CudaRNGStatesTracker.fork = lambda self, *arguments, **options: contextlib.nullcontext()
STEP = 7


def config_of(arguments: dict[str, Any]) -> TransformerConfig:
    """As Megatron-LM's core_transformer_config_from_args: most fields have the names of arguments."""
    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    values = {field.name: arguments[field.name] for field in fields(kind) if field.name in arguments}
    values |= {
        "layernorm_epsilon": arguments["norm_epsilon"],
        "gated_linear_unit": arguments["swiglu"],
        "activation_func": torch.nn.functional.silu if arguments["swiglu"] else torch.nn.functional.gelu,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "bf16": False,
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": mpu.get_virtual_pipeline_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "moe_token_dispatcher_type": "allgather",
        **{f"{name}_fusion": False for name in ("masked_softmax", "bias_activation", "bias_dropout")},
        **{"apply_rope_fusion": False, "gradient_accumulation_fusion": False},
    }
    return kind(**values)


def stages_of(arguments: dict[str, Any]) -> list[GPTModel]:
    """The virtual stages of this rank, with random weights."""
    config = config_of(arguments)
    virtual = config.virtual_pipeline_model_parallel_size
    stages = []
    for chunk in range(virtual or 1):
        spec = (
            get_gpt_decoder_block_spec(config, False, arguments["normalization"], vp_stage=chunk if virtual else None)
            if config.num_moe_experts
            else get_gpt_layer_local_spec(
                normalization=arguments["normalization"],
                multi_latent_attention=config.multi_latent_attention,
                qk_layernorm=config.qk_layernorm,
            )
        )
        stage = GPTModel(
            config,
            spec,
            arguments["padded_vocab_size"],
            arguments["max_position_embeddings"],
            mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk if virtual else None),
            mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk if virtual else None),
            parallel_output=False,
            position_embedding_type=arguments["position_embedding_type"],
            share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
            rotary_base=arguments.get("rotary_base", 10000),
            vp_stage=chunk if virtual else None,
        )
        stages.append(stage)
    return stages


def randomize(stages: list[GPTModel]) -> None:
    """Norms and biases are constant after initialization: give them values, the same on ranks that share them."""
    for stage in stages:
        for name, parameter in [*stage.named_parameters(), *stage.named_buffers()]:
            if parameter.dim() == 1 and parameter.is_floating_point():
                split = getattr(parameter, "tensor_model_parallel", False)
                rank = mpu.get_tensor_model_parallel_rank() if split else 0
                generator = torch.Generator().manual_seed(hash(len(name)) % 1000 + 17 * rank)
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                with torch.no_grad():
                    parameter.add_(noise)


def initialize(tp: int = 1, pp: int = 1, virtual_stages: int = 1, ep: int = 1) -> None:
    mpu.destroy_model_parallel()
    virtual = virtual_stages if virtual_stages > 1 else None
    mpu.initialize_model_parallel(tp, pp, virtual, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)


def states_of(stages: list[GPTModel], half: bool) -> list[dict[str, Any]]:
    """The state of AdamW by Megatron-LM's groups: of dense parameters, and of experts if ep splits these."""
    groups = _get_param_groups(stages, OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1), None)
    states = []
    for experts in (False, True):
        own = [dict(group) for group in groups if group["is_expert_parallel"] == experts and group["params"]]
        if not own:
            continue
        parameters = [parameter for group in own for parameter in group["params"]]
        state, masters = {}, []
        for group in own:
            masters.append([])
            for parameter in group["params"]:
                values = parameter.detach().float()
                # the same on ranks that share the parameter
                first = values.flatten()[: min(values.numel(), 7)].sum()
                state[len(state)] = {"exp_avg": values * 0.1 + first, "exp_avg_sq": (values * first) ** 2}
                if half:
                    master = values + values * 1e-4
                    with torch.no_grad():
                        parameter.copy_(master)
                    masters[-1].append(master)
        for values in state.values():
            values["step"] = torch.tensor(float(STEP))
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        for group in own:
            group["params"] = [numbers[id(parameter)] for parameter in group["params"]]
        states.append({"inner": {"state": state, "param_groups": own}, "masters": masters, "parameters": parameters})
    return states


def legacy_optimizer(states: list[dict[str, Any]]) -> Any:
    optimizers = [
        {"optimizer": each["inner"], "fp32_from_fp16_params": each["masters"]}
        if any(each["masters"])
        else each["inner"]
        for each in states
    ]
    return optimizers[0] if len(optimizers) == 1 else optimizers


def common_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "args": Namespace(**arguments, iteration=STEP, consumed_train_samples=STEP * arguments["global_batch_size"]),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": STEP * arguments["global_batch_size"]},
    }


def metadata() -> dict[str, Any]:
    return {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True), "chained_optim_avoid_prefix": True}


def sharded(stages: list[GPTModel]) -> dict[str, Any]:
    keys = ["model"] if len(stages) == 1 else [f"model{index}" for index in range(len(stages))]
    return {key: stage.sharded_state_dict(metadata=metadata()) for key, stage in zip(keys, stages, strict=True)}


def save_dist(place: Path, stages: list[GPTModel], states: list[dict[str, Any]], arguments: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    model = sharded(stages)
    optimizers = {}
    for number, each in enumerate(states):
        places = get_param_id_to_sharded_param_map(model, each["parameters"])
        inner = {"state": {at: dict(values) for at, values in each["inner"]["state"].items()}}
        inner["param_groups"] = each["inner"]["param_groups"]
        optim_state_to_sharding_state(inner, places, exclude_keys=("step",))
        inner["state"]["common_step"] = torch.tensor(float(STEP))
        if any(each["masters"]):
            masters = [
                [
                    make_sharded_optimizer_tensor(places[at], master, "optimizer.state.fp32_param")
                    for at, master in zip(group["params"], masters, strict=True)
                ]
                for group, masters in zip(each["inner"]["param_groups"], each["masters"], strict=True)
            ]
            optimizers[number] = {"optimizer": inner, "fp32_from_fp16_params": masters}
        else:
            optimizers[number] = inner
    optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
    dist_checkpointing.save(
        {**common_of(arguments), **model, "optimizer": optimizer},
        str(place),
        validate_access_integrity=False,
        content_metadata={"chained_optim_avoid_prefix": True},
    )


def distributed_optimizer(stages: list[GPTModel], states: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
    """The distributed optimizer of the stages, with the state of each parameter that `states` has."""
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = parameter.data.clone()  # not in the buffer of another one
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=arguments["overlap_grad_reduce"],
        use_distributed_optimizer=True,
        bucket_size=arguments["ddp_bucket_size"],
    )
    chunks = [
        DistributedDataParallel(stage.config, options, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(stages)
    ]
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, bf16=bool(arguments.get("bf16")), use_distributed_optimizer=True
    )
    chained = get_megatron_optimizer(config, chunks)
    whole = {}
    for each in states:
        masters = iter([master for group in each["masters"] for master in group])
        for number, parameter in enumerate(each["parameters"]):
            values = {name: each["inner"]["state"][number][name] for name in ("exp_avg", "exp_avg_sq")}
            whole[parameter] = values | {"param": next(masters, parameter.detach())}
    for optimizer in chained.chained_optimizers:
        optimizer.init_state_fn(optimizer.optimizer)
        for parameter in optimizer.model_param_group_index_map:
            part = optimizer._get_model_param_range_map(parameter)["param"]
            values = {
                name: tensor.flatten()[part.start : part.end].float() for name, tensor in whole[parameter].items()
            }
            with torch.no_grad():
                optimizer._set_main_param_and_optimizer_states(parameter, values)
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(float(STEP))
    return chained


def save_distributed(
    place: Path, stages: list[GPTModel], states: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    """Save in both sharding types of torch_dist, and in the legacy format, with the distributed optimizer.

    megatron-core 0.16.1 gathers buckets without the padding at their ends, and then looks for parameters at their
    places with it: fully_reshardable is right if no bucket is padded, as here without `overlap_grad_reduce`, and
    "padded" has wrong state.
    """
    arguments = arguments | {"use_distributed_optimizer": True}
    one_bucket = distributed_optimizer(stages, states, arguments | {"overlap_grad_reduce": False})
    save_sharded(place, "fully_reshardable", stages, one_bucket, arguments)
    optimizer = distributed_optimizer(stages, states, arguments)
    save_sharded(place, "dp_reshardable", stages, optimizer, arguments)
    save_sharded(place, "fully_reshardable", stages, optimizer, arguments, "padded")
    directory = save_legacy(place / "legacy" / f"iter_{STEP:07d}", stages, optimizer.state_dict(), arguments)
    optimizer.save_parameter_state(str(directory / "distrib_optim.pt"))
    dist.barrier()


def save_sharded(
    place: Path, kind: str, stages: list[GPTModel], optimizer: Any, arguments: dict[str, Any], name: str = ""
) -> None:
    """Save in torch_dist, with a sharding type of the distributed optimizer."""
    directory = place / (name or kind) / f"iter_{STEP:07d}"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    options, model = metadata() | {"distrib_optim_sharding_type": kind}, sharded(stages)
    dist_checkpointing.save(
        {**common_of(arguments), **model, "optimizer": optimizer.sharded_state_dict(model, metadata=options)},
        str(directory),
        validate_access_integrity=False,
        content_metadata={"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": kind},
    )


def save_legacy(place: Path, stages: list[GPTModel], optimizer: Any, arguments: dict[str, Any]) -> Path:
    """Save what a rank has in the legacy format, and return the directory of the rank."""
    ranks = [
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    ]
    name = f"mp_rank_{ranks[0]:02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ranks[1]:03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{ranks[2]:03d}"
    keys = ["model"] if len(stages) == 1 else [f"model{index}" for index in range(len(stages))]
    content = common_of(arguments)
    for key, stage in zip(keys, stages, strict=True):
        content[key] = stage.state_dict_for_save_checkpoint()
    content["optimizer"] = optimizer
    directory = place / name
    if mpu.get_data_parallel_rank() == 0 or mpu.get_expert_model_parallel_world_size() > 1:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / "model_optim_rng.pt")
    dist.barrier()
    return directory


def logits_of(place: Path, arguments: dict[str, Any]) -> torch.Tensor:
    """The logits of a torch_dist checkpoint on one rank, in fp32."""
    initialize()
    (stage,) = stages_of(arguments)
    loaded = dist_checkpointing.load({"model": stage.sharded_state_dict(metadata=metadata())}, str(place))
    stage.load_state_dict(loaded["model"])
    stage.eval()
    tokens = torch.arange(24).view(2, 12) * 7 % arguments["vocab_size"]
    positions = torch.arange(12).expand(2, 12)
    with torch.no_grad():
        return stage(tokens, positions, torch.triu(torch.ones(1, 1, 12, 12), 1).bool())


def write(case: dict[str, Any], out: Path) -> None:
    arguments, layout = case["arguments"], case["layout"]
    initialize(**layout)
    arguments = arguments | {
        "tensor_model_parallel_size": layout.get("tp", 1),
        "pipeline_model_parallel_size": layout.get("pp", 1),
        "virtual_pipeline_model_parallel_size": layout.get("virtual_stages"),
        "expert_model_parallel_size": layout.get("ep", 1),
        "expert_tensor_parallel_size": layout.get("tp", 1),
        "data_parallel_size": mpu.get_data_parallel_world_size(),
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 20_000,
    }
    torch.manual_seed(1)
    stages = stages_of(arguments)
    randomize(stages)
    half = bool(arguments.get("bf16"))
    if half:
        for stage in stages:
            stage.bfloat16()
            for module in stage.modules():
                if getattr(module, "expert_bias", None) is not None:
                    module.expert_bias.data = module.expert_bias.float()
    states = states_of(stages, half)
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    save_dist(out / "dist" / f"iter_{STEP:07d}", stages, states, arguments)
    save_legacy(out / "legacy" / f"iter_{STEP:07d}", stages, legacy_optimizer(states), arguments)
    save_distributed(out / "distributed", stages, states, arguments)
    logits = logits_of(out / "dist" / f"iter_{STEP:07d}", arguments)
    if dist.get_rank() == 0:
        for form in ("dist", "legacy"):
            (out / form / "latest_checkpointed_iteration.txt").write_text(str(STEP))
        torch.save(logits, out / "logits.pt")


def main() -> None:
    command, cases, *places = sys.argv[1:]
    dist.init_process_group("gloo")
    for name, case in json.loads(Path(cases).read_text()).items():
        if command == "write":
            write(case, Path(places[0]) / name)
        else:
            torch.save(logits_of(Path(places[0]) / name, case["arguments"]), Path(places[1]) / f"{name}.pt")


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
