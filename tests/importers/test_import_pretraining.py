"""Imported configurations of torchtitan and Megatron-LM: what a run makes of them."""

from __future__ import annotations

import math
import sys
from io import StringIO
from typing import Any

import pytest

from megalite.commands.import_config import main
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.values import nest
from megalite.importers.convert import convert
from megalite.importers.projects import PROJECTS
from tests.importers.imported import imported

TITAN = """
[job]
dump_folder = "./outputs"
[profiling]
enable_profiling = false
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 4
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
fsdp_reshard_after_forward = "default"
[checkpoint]
enable = true
interval = 500
keep_latest_k = 0
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
filter_fqns = ["output"]
[experiment]
sauce = 1
"""


def titan(**changes: str) -> str:
    """The file with other values of keys, or further ones in the section parallelism."""
    lines = TITAN.splitlines()
    for key, value in changes.items():
        place = next((number for number, line in enumerate(lines) if line.startswith(f"{key} =")), None)
        if place is None:
            lines.insert(lines.index("[parallelism]") + 1, f"{key} = {value}")
        else:
            lines[place] = f"{key} = {value}"
    return "\n".join(lines)


def test_a_torchtitan_file_trains_the_same(tmp_path, capsys):
    (tmp_path / "llama3_8b.toml").write_text(TITAN)
    options, lost, notes, config = imported(capsys, tmp_path, tmp_path / "llama3_8b.toml", "--dp", 8)
    assert lost.keys() == {"experiment.sauce"} and "unknown key of torchtitan" in lost["experiment.sauce"]
    assert (config.model.hidden_size, config.model.num_hidden_layers, config.model.kv_heads) == (4096, 32, 8)
    assert config.model.intermediate_size == 1024 * math.ceil(int(1.3 * int(8 * 4096 / 3)) / 1024)
    assert config.train.global_batch_size == 4 * 8 and ParallelDims.of(config).microbatches == 1
    assert (config.parallel.zero, config.parallel.zero3_reshard, config.train.precision) == (3, "action", "bf16")
    assert (config.optimizer.decay, config.optimizer.min_lr, config.optimizer.warmup_steps) == ("linear", 0, 200)
    assert (
        options["checkpoint.interval"] == 500 and options["checkpoint.async_save"] and "checkpoint.keep" not in options
    )
    assert notes["approximate"].keys() >= {"activation_checkpoint.mode", "model.flavor"}
    assert notes["open"].keys() == {"training.dataset"}
    assert "optimizer.weight_decay" in notes["assumed"]


def test_torchtitans_mesh_and_batch(tmp_path, capsys):
    """A pipeline cuts the local batch into microbatches; replicas of shards are HSDP; tensor parallelism is along the
    sequence, too."""
    text = titan(
        data_parallel_replicate_degree="2",
        data_parallel_shard_degree="4",
        tensor_parallel_degree="2",
        pipeline_parallel_degree="2",
        pipeline_parallel_schedule='"Interleaved1F1B"',
        selective_ac_option='"2"',
    )
    (tmp_path / "hsdp.toml").write_text(text)
    config = imported(capsys, tmp_path, tmp_path / "hsdp.toml")[3]
    dims = ParallelDims.of(config)
    assert (dims.tp, dims.pp, dims.dp, dims.shard, dims.replicate, dims.stages) == (2, 2, 8, 4, 2, 4)
    assert config.train.global_batch_size == 4 * 8 and (config.train.micro_batch_size, dims.microbatches) == (1, 4)
    assert (
        config.parallel.sequence_parallel
        and config.parallel.zero3_reshard == "step"
        and config.train.recompute == "every-2"
    )


@pytest.mark.parametrize(
    ("changes", "expected", "kind", "key"),
    [
        ({"global_batch_size": "64"}, {"train.global_batch_size": 64}, "open", "training.dataset"),
        ({"data_parallel_shard_degree": "1"}, {"parallel.zero": 0, "parallel.dp": 1}, "open", "training.dataset"),
        ({"context_parallel_degree": "2"}, {"parallel.zero": 3, "parallel.cp": 2}, "open", "training.dataset"),
        ({"flavor": '"9B"'}, {"parallel.zero": 3}, "lost", "model.flavor"),
        (
            {"flavor": '"debugmodel"'},
            {"model.intermediate_size": 768, "model.vocab_size": 2048},
            "approximate",
            "model.flavor",
        ),
        ({"name": '"Muon"'}, {"optimizer.lr": 3e-4, "optimizer.name": "muon"}, "approximate", "optimizer.name"),
        ({"name": '"Adagrad"'}, {"optimizer.lr": 3e-4}, "lost", "optimizer.name"),
        ({"expert_parallel_degree": "2"}, {"parallel.zero": 3}, "lost", "parallelism.expert_parallel_degree"),
        (
            {"flavor": '"671B"', "expert_parallel_degree": "1"},
            {"model.preset": "deepseek-v3"},
            "approximate",
            "model.flavor",
        ),
        (
            {"expert_tensor_parallel_degree": "2"},
            {"parallel.zero": 3},
            "lost",
            "parallelism.expert_tensor_parallel_degree",
        ),
    ],
    ids=str,
)
def test_torchtitans_values(tmp_path, capsys, changes, expected, kind, key):
    text = titan(**changes)
    if "name" in changes:
        text = TITAN.replace('name = "AdamW"', f"name = {changes['name']}")
    if "global_batch_size" in changes:
        text = TITAN.replace("seq_len", "global_batch_size = 64\nseq_len")
    if "671B" in changes.get("flavor", ""):
        text = text.replace('name = "llama3"', 'name = "deepseek_v3"')
    (tmp_path / "run.toml").write_text(text)
    options, lost, notes, _ = imported(capsys, tmp_path, tmp_path / "run.toml")
    assert {option: options.get(option) for option in expected} == expected
    assert key in (lost if kind == "lost" else notes[kind])


LLAMA = """#!/bin/bash
# torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 1
GPUS_PER_NODE=8; export NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=${TP:-2}
CHECKPOINT_PATH=${1:-"ckpt/llama"}
DATA_PATH=$2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # a comment
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408
    --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --seq-length 1024 --max-position-embeddings 2048
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 --vocab-size 32000
)
TRAINING_ARGS="
    --micro-batch-size 1 --global-batch-size $((WORLD_SIZE * 8)) \\
    --train-samples 128000 --lr-warmup-samples 1280 --lr-decay-samples 128000 \\
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
"
FP8=()
if [[ "$DTYPE" == "fp8" ]]; then
    FP8+=("--fp8-format hybrid")
fi
PARALLEL=("--tensor-model-parallel-size $TP" "--pipeline-model-parallel-size 2" --sequence-parallel)
PARALLEL+=(--use-distributed-optimizer --overlap-grad-reduce --num-layers-per-virtual-pipeline-stage 2)
mkdir -p "$CHECKPOINT_PATH"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" \\
    $TRAINING_ARGS ${PARALLEL[@]} ${FP8[@]} \\
    --data-path $DATA_PATH --split 99,1,0 --save "$CHECKPOINT_PATH" --load $CHECKPOINT_PATH \\
    --recompute-activations --exit-duration-in-mins 235 --made-up 3 --eval-interval 100 ${MORE}
"""


def test_a_script_of_megatron_trains_the_same(tmp_path, capsys):
    (tmp_path / "train_llama.sh").write_text(LLAMA)
    options, lost, notes, config = imported(capsys, tmp_path, tmp_path / "train_llama.sh")
    dims = ParallelDims.of(config)
    assert (dims.tp, dims.pp, dims.dp, dims.world, dims.virtual_stages) == (2, 2, 4, 16, 2)
    assert config.train.global_batch_size == 128 == 1 * dims.microbatches * dims.dp
    assert (config.train.steps, config.optimizer.warmup_steps) == (128000 // 128, 1280 // 128)
    model = config.model
    assert (model.num_hidden_layers, model.intermediate_size, model.kv_heads, model.rope_theta) == (8, 1408, 4, 500000)
    assert (model.norm, model.hidden_act, model.gated_mlp, model.mlp_bias, model.tie_word_embeddings) == (
        "rms",
        "silu",
        True,
        False,
        False,
    )
    assert (config.parallel.zero, config.train.recompute, config.train.stop_after) == (1, "selective", "235m")
    assert options["data.validation"] == 0.01 and options["validation.interval"] == 100
    assert lost.keys() == {"made-up"} and "unknown key of Megatron-LM" in lost["made-up"]
    assert notes["open"].keys() == {"data-path", "${MORE}", "$FP8"} and "set data.train" in notes["open"]["data-path"]


def test_a_command_of_megatron_and_its_defaults(tmp_path, capsys):
    """What GPT is without arguments: learned positions, LayerNorm, GELU, biases, dropout, tied embeddings, no
    distributed optimizer."""
    command = (
        "pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 "
        "--hidden-size 12288 "
        "--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 1536 "
        "--rampup-batch-size 16 16 5859375 --train-iters 500000 --lr-decay-iters 430000 --lr-warmup-fraction .001 --lr "
        "6.0e-5 "
        "--min-lr 6.0e-6 --lr-decay-style cosine --fp16 --init-method-std 0.006 --recompute-granularity full "
        "--recompute-method uniform"
    )
    options, lost, notes, config = imported(capsys, tmp_path, "megatron", command, "--dp", 2)
    model = config.model
    assert (model.position, model.norm, model.hidden_act, model.gated_mlp) == (
        "learned",
        "layer",
        "gelu_pytorch_tanh",
        False,
    )
    assert (model.intermediate_size, model.attention_dropout, model.residual_dropout, model.tie_word_embeddings) == (
        49152,
        0.1,
        0.1,
        True,
    )
    assert model.attention_bias and model.attention_out_bias and model.mlp_bias
    assert (config.parallel.zero, config.optimizer.betas, config.optimizer.weight_decay) == (0, [0.9, 0.999], 0.01)
    assert (config.fp16.initial_scale_power, config.train.recompute, config.optimizer.warmup_steps) == (32, "full", 430)
    assert lost.keys() == {"lr-decay-iters"} and "430000" in lost["lr-decay-iters"]
    assert config.train.rampup_batch_size == [16, 16, 5859375]
    assert options["train.global_batch_size"] == 1536 and "weight-decay" in notes["assumed"]


MIXTURE = (
    "--num-layers 12 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 2048 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 16 "
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 512 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion "
    "--moe-router-dtype fp32"
)
MADE = {  # further arguments → what they set; kind and key of a remark
    "--moe-aux-loss-coeff 1e-2": (
        {"router_aux_loss_coef": 0.01 * 12 / 4, "router_balance": "global"},
        "approximate",
        "moe-aux-loss-coeff",
    ),
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-layer-freq '([0]*3+[1]*9)'": (
        {"router_aux_loss_coef": 0.01 * 9 / 4, "router_balance": "sequence", "mlp_only_layers": [0, 1, 2]},
        "",
        "",
    ),
    "--moe-layer-freq 4 --moe-z-loss-coeff 1e-3": (
        {"mlp_only_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11], "router_z_loss_coef": 0.003},
        "",
        "",
    ),
    "--moe-layer-freq '[1]*5'": ({"mlp_only_layers": None}, "lost", "moe-layer-freq"),
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-4 "
    "--moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-bias-update-rate 1e-4": (
        {
            "router_scores": "sigmoid",
            "router_balance": "bias",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        }
        | {"router_bias_rate": 1e-4, "router_aux_loss_coef": 0.0},
        "lost",
        "moe-aux-loss-coeff",
    ),
    "--moe-router-num-groups 4 --moe-router-group-topk 2": (
        {"n_group": 4, "topk_group": 2},
        "approximate",
        "moe-router-num-groups",
    ),
    "--moe-router-pre-softmax --moe-expert-capacity-factor 1.5": (
        {"norm_topk_prob": False, "expert_capacity_factor": 1.5},
        "approximate",
        "moe-expert-capacity-factor",
    ),
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm "
    "--kv-channels 48": (
        {
            "kv_lora_rank": 64,
            "q_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "qk_norm": "none",
        },
        "",
        "",
    ),
    "--multi-latent-attention": ({"kv_lora_rank": 32, "q_lora_rank": None}, "approximate", "multi-latent-attention"),
    "--moe-router-load-balancing-type sinkhorn": (
        {"router_balance": "global"},
        "lost",
        "moe-router-load-balancing-type",
    ),
    "--moe-input-jitter-eps 0.1": ({"num_experts": 16}, "lost", "moe-input-jitter-eps"),
    "--moe-use-upcycling": ({"num_experts": 16}, "lost", "moe-use-upcycling"),
}


@pytest.mark.parametrize("arguments", MADE)
def test_a_mixture_of_megatron(arguments, tmp_path, capsys):
    """Losses are summed over layers there, with shares that add up to 1, and averaged over mixtures here, with shares
    that add up to k."""
    expected, kind, key = MADE[arguments]
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MIXTURE} {arguments}"
    _, lost, notes, config = imported(capsys, tmp_path, "megatron", command)
    model = config.model
    assert (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size, config.parallel.ep) == (
        16,
        4,
        256,
        4,
    )
    assert model.shared_expert_intermediate_size == 512 and not model.shared_expert_gate
    assert {name: pytest.approx(getattr(model, name)) for name in expected} == expected
    remarks = dict.fromkeys(lost, "lost") | dict.fromkeys(notes.get("approximate", {}), "approximate")
    assert remarks == ({key: kind} if kind else {})


def test_a_ramp_of_megatrons_batch_size(tmp_path, capsys):
    """As its loop over batches that grow counts them."""
    arguments = (
        "--num-layers 8 --micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 4 4 1000 --train-samples 5008"
    )
    options, lost, _, config = imported(capsys, tmp_path, "megatron", f"pretrain_gpt.py {arguments}", "--dp", 1)
    steps = samples = 0
    while samples < 5008:
        samples += 4 + 4 * min(samples * 3 // 1000, 3)
        steps += 1
    assert options["train.rampup_batch_size"] == [4, 4, 1000] and options["train.steps"] == steps and not lost


def test_values_that_megatron_computes(tmp_path, capsys):
    def options(arguments: str, *more: str) -> dict[str, Any]:
        return imported(capsys, tmp_path, "megatron", f"pretrain_gpt.py --num-layers 8 {arguments}", *more)[0]

    assert options("--micro-batch-size 4", "--dp", "8")["train.global_batch_size"] == 32
    shape = "--hidden-size 768 --num-attention-heads 12 --swiglu"
    assert options(shape)["model.intermediate_size"] == int(4 * 768 * 2 / 3 / 64) * 64
    assert options(shape + " --disable-bias-linear --add-qkv-bias")["model.attention_bias"]
    pipeline = (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3"
    )
    assert options(pipeline)["parallel.partition"] == [1, 2, 2, 3]
    wsd = "--train-iters 1000 --lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 200"
    assert options(wsd)["optimizer.wsd_decay_fraction"] == 0.2
    fsdp = "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    assert options(f"{fsdp} --num-distributed-optimizer-instances 2", "--dp", "8")["parallel.dp_shard"] == 4
    assert options(fsdp)["parallel.zero"] == 3
    ahead = options("--mtp-num-layers 1 --use-rotary-position-embeddings")
    assert (ahead["model.mtp_layers"], ahead["train.mtp_weight"]) == (1, 0.1)
    (tmp_path / "a.bin").touch(), (tmp_path / "a.idx").touch()
    assert options(f"--data-path 2 {tmp_path}/a")["data.train"] == {f"{tmp_path}/a": 2.0}
    split = options("--context-parallel-size 2 --cp-comm-type p2p --micro-batch-size 1 --global-batch-size 4")
    assert (split["parallel.cp"], split["parallel.context"]) == (2, "ring")


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "x", ["a"]], ids=str)
def test_any_value_of_any_key_is_accounted_for(project, value):
    """Whatever a file says, no key is dropped silently, and what comes out has the types and ranges of our options."""
    keys = [key.replace("*", "other") for key in PROJECTS[project].TABLE]
    for part in (keys[::2], keys[1::2]):
        try:
            imported = convert(dict.fromkeys(part, value), 2, project=project)
        except ConfigError as error:
            assert "Correct one of them" in str(error)
            continue
        assert {*part} <= {*imported.honoured, *(remark.key for remark in imported.remarks)}
        assert from_dict(nest(imported.options))


def test_a_script_on_stdin_is_recognized(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", StringIO("torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 4 --micro-batch-size 2\n")
    )
    main(["-"])
    captured = capsys.readouterr()
    assert "num_hidden_layers: 4" in captured.out and "stdin, Megatron-LM's configuration" in captured.err


def test_data_of_megatron(tmp_path, capsys):
    """Without --split Megatron-LM holds out 3% of the data for validation; a prefix that appears twice has both
    weights."""
    for end in ("bin", "idx"):
        (tmp_path / f"a.{end}").touch()
    command = f"pretrain_gpt.py --num-layers 8 --data-path 0.3 {tmp_path}/a 0.7 {tmp_path}/a"
    options, _, notes, _ = imported(capsys, tmp_path, "megatron", command)
    assert options["data.train"] == {f"{tmp_path}/a": 1.0}
    assert (options["data.validation"], options["validation.interval"]) == (0.03, 1000)
    assert "default of the project" in notes["approximate"]["split"]


@pytest.mark.parametrize("comment", ["---", "# axolotl train --debug x"])
@pytest.mark.parametrize("project", [["axolotl"], []], ids=str)
def test_yaml_on_stdin_is_no_script(monkeypatch, capsys, project, comment):
    monkeypatch.setattr(sys, "stdin", StringIO(f"{comment}\nbase_model: x/y\n"))
    main([*project, "-"])
    captured = capsys.readouterr()
    assert "from_hf: x/y" in captured.out and "axolotl's configuration" in captured.err
