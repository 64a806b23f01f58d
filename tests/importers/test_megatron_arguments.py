"""Megatron-LM's arguments together: which of them switch off others or change their meaning, as its validate_args and
models do."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from megalite.commands.import_config import main
from megalite.importers.shell import grammar
from tests.importers.imported import imported

SHAPE = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128"
ROPE, LATENT, EXPERTS = (
    "--position-embedding-type rope",
    "--multi-latent-attention --qk-layernorm",
    "--num-experts 8 --moe-router-topk 4",
)
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ABSENT = object()
# arguments → options, key → its remark's kind and reason
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    f"{ROPE} --use-rope-scaling": (
        {"model.rope_scaling": LLAMA3 | {"factor": 8.0}},
        {
            "rope-scaling-factor": ("assumed", "default of the project"),
            "use-rope-scaling": ("harmless", "determined by rope-scaling-factor"),
        },
    ),
    f"{ROPE} --use-rope-scaling --rope-scaling-factor 32": (
        {"model.rope_scaling": LLAMA3 | {"factor": 32.0}},
        {"use-rope-scaling": ("approximate", "pretrain_gpt.py always scales by 8")},
    ),
    f"{ROPE} {LATENT} --use-rope-scaling": (
        {"model.rope_scaling": ABSENT, "model.position": "rope"},
        {"use-rope-scaling": ("harmless", "latent attention"), "kv-lora-rank": ("assumed", "default of the project")},
    ),
    f"{ROPE} {LATENT} --use-rope-scaling --rope-scaling-factor 8": (
        {"model.rope_scaling": ABSENT},
        {"use-rope-scaling": ("harmless", "rotary embeddings of latent attention")},
    ),
    "--use-rope-scaling --rope-scaling-factor 8": (
        {"model.rope_scaling": ABSENT, "model.position": "learned"},
        {"use-rope-scaling": ("harmless", "positions are not rotary")},
    ),
    f"{ROPE} --rope-scaling-factor 8": (
        {"model.rope_scaling": ABSENT},
        {"rope-scaling-factor": ("harmless", "use-rope-scaling is off")},
    ),
    LATENT: (
        {"model.position": "rope", "model.kv_lora_rank": 32, "model.qk_nope_head_dim": 128, "model.v_head_dim": 128},
        {
            "position-embedding-type": ("approximate", "without learned ones"),
            "v-head-dim": ("assumed", "default of the project"),
        },
    ),
    f"{ROPE} {LATENT} --kv-lora-rank 64 ${{MORE[@]}}": (
        {"model.kv_lora_rank": 64, "model.v_head_dim": 128},
        {"v-head-dim": ("assumed", "unless ${MORE[@]} overrides it"), "${MORE[@]}": ("open", "not set in the script")},
    ),
    f"{ROPE} {LATENT} --kv-lora-rank $RANK": (
        {"model.kv_lora_rank": ABSENT},
        {"kv-lora-rank": ("open", "set model.kv_lora_rank")},
    ),
    f"{ROPE} {LATENT} --rotary-scaling-factor 40 --rope-type rope": (
        {},
        {"rotary-scaling-factor": ("harmless", "does not scale positions")},
    ),
    f"{ROPE} {LATENT} --rotary-scaling-factor 40": ({}, {"rotary-scaling-factor": ("lost", "yarn")}),
    f"{ROPE} {LATENT} --rotary-percent 0.5 --kv-channels 64": (
        {"model.partial_rotary_factor": ABSENT, "model.head_dim": ABSENT},
        {"rotary-percent": ("harmless", "qk-head-dim"), "kv-channels": ("harmless", "qk-head-dim")},
    ),
    "--rotary-seq-len-interpolation-factor 2": (
        {},
        {"rotary-seq-len-interpolation-factor": ("harmless", "rotary positions")},
    ),
    f"{ROPE} --no-rope-freq 4": ({"model.no_rope_layers": [3, 7]}, {}),
    f"{ROPE} --no-rope-freq '([0]*3+[1]*5)'": ({"model.no_rope_layers": [3, 4, 5, 6, 7]}, {}),
    "--no-rope-freq 4": ({"model.no_rope_layers": ABSENT}, {"no-rope-freq": ("harmless", "not rotary")}),
    "--window-size 127,0 --window-attn-skip-freq 2": (
        {"model.sliding_window": 128, "model.sliding_window_layers": [0, 2, 4, 6]},
        {},
    ),
    "--window-size 63,0 --window-attn-skip-freq '[1]*6+[0]*2'": (
        {"model.sliding_window_layers": [0, 1, 2, 3, 4, 5]},
        {},
    ),
    "--window-attn-skip-freq 2": (
        {"model.sliding_window_layers": ABSENT},
        {"window-attn-skip-freq": ("harmless", "window-size is not set")},
    ),
    "--group-query-attention": (
        {"model.num_key_value_heads": 1},
        {
            "num-query-groups": ("assumed", "default of the project"),
            "group-query-attention": ("harmless", "determined by num-query-groups"),
        },
    ),
    "--group-query-attention --num-query-groups $KV": (
        {"model.num_key_value_heads": ABSENT},
        {"num-query-groups": ("open", "set model.num_key_value_heads")},
    ),
    "--num-query-groups 4": (
        {"model.num_key_value_heads": ABSENT},
        {"num-query-groups": ("harmless", "group-query-attention is off")},
    ),
    "--moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2": (
        {
            "model.num_experts_per_tok": ABSENT,
            "model.moe_intermediate_size": ABSENT,
            "model.router_aux_loss_coef": ABSENT,
        },
        {
            "moe-router-topk": ("harmless", "num-experts is not set"),
            "moe-aux-loss-coeff": ("harmless", "num-experts is not set"),
        },
    ),
    "--num-experts 0 --moe-router-topk 4": (
        {"model.num_experts": ABSENT},
        {"moe-router-topk": ("harmless", "num-experts is not set")},
    ),
    "--num-experts 8 --moe-aux-loss-coeff 1e-2": (
        {"model.num_experts_per_tok": 2, "model.router_aux_loss_coef": pytest.approx(0.01 * 8 / 2)},
        {"moe-router-topk": ("assumed", "default of the project")},
    ),
    "--num-experts 8 --moe-router-topk $K --moe-aux-loss-coeff 1e-2": (
        {"model.router_aux_loss_coef": ABSENT},
        {
            "moe-aux-loss-coeff": ("lost", "0.08 / model.num_experts_per_tok"),
            "moe-router-topk": ("open", "set model.num_experts_per_tok"),
        },
    ),
    f"{EXPERTS} --moe-router-pre-softmax --moe-router-score-function sigmoid": (
        {"model.router_scores": "sigmoid", "model.norm_topk_prob": ABSENT},
        {"moe-router-pre-softmax": ("harmless", "sigmoids")},
    ),
    "--fp8-amax-history-len 1024": ({}, {"fp8-amax-history-len": ("harmless", "fp8-format is not set")}),
    "--fp8-format hybrid --fp8-recipe delayed": (
        {},
        {"fp8-format": ("lost", "float8 is not supported"), "fp8-recipe": ("lost", "float8 is not supported")},
    ),
    "--recompute-method uniform --recompute-num-layers 1": (
        {"train.recompute": ABSENT},
        {"recompute-method": ("harmless", "recompute-granularity is not set")},
    ),
    "--recompute-granularity full --recompute-modules moe": (
        {"train.recompute": "full"},
        {"recompute-modules": ("harmless", "selective")},
    ),
    "--recompute-granularity selective --recompute-modules moe": (
        {},
        {"recompute-modules": ("lost", "only attention is supported")},
    ),
    "--checkpoint-activations": ({"train.recompute": "full"}, {}),
    f"--hybrid-layer-pattern 'M-M*|ME/*' --mamba-num-heads 8 --mamba-state-dim 16 --linear-num-key-heads 4 {EXPERTS} "
    "--moe-aux-loss-coeff 0.01 --norm-epsilon 1e-6 --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec": (
        {
            "model.num_hidden_layers": 6,
            "model.layer_blocks": ["mamba", "feed_forward", "mamba", "attention", "mamba", "mixture"],
            "model.mamba_num_heads": 8,
            "model.mamba_state_size": 16,
            "model.linear_num_key_heads": ABSENT,
            "model.router_aux_loss_coef": 0.0025,
        },
        {
            "hybrid-layer-pattern": ("approximate", "MTP modules are left out; norms of mamba blocks"),
            "num-layers": ("harmless", "pattern"),
            "spec": ("harmless", "pattern"),
            "linear-num-key-heads": ("harmless", "no delta blocks"),
        },
    ),
    "--hybrid-override-pattern 'M*M*'": ({"model.mamba_num_heads": 8}, {"mamba-num-heads": ("assumed", "default")}),
    "--hybrid-layer-pattern MD": ({"model.layer_blocks": ABSENT}, {"hybrid-layer-pattern": ("lost", "kind D")}),
    "--hybrid-layer-pattern G- --squared-relu": ({}, {"hybrid-layer-pattern": ("lost", "SiLU")}),
    "--hybrid-attention-ratio 0.1": ({}, {"hybrid-attention-ratio": ("lost", "set model.layer_blocks")}),
    f"{ROPE} --swiglu --experimental-attention-variant gated_delta_net --linear-attention-freq 4 {EXPERTS} "
    "--moe-layer-freq '([0]*1+[1]*7)' --linear-num-key-heads 4 --linear-num-value-heads 8 --attention-output-gate": (
        {
            "model.layer_blocks": ["delta+feed_forward", *["delta+mixture"] * 2, "attention+mixture"]
            + [*["delta+mixture"] * 3, "attention+mixture"],
            "model.linear_num_value_heads": 8,
            "model.attention_gate": True,
            "model.num_hidden_layers": 8,
        },
        {"linear-attention-freq": ("harmless", "kind of attention")},
    ),
    "--experimental-attention-variant dsa": ({}, {"experimental-attention-variant": ("lost", "only gated_delta_net")}),
    "--tensor-model-parallel-size $TP --sequence-parallel": (
        {"parallel.dp": ABSENT, "parallel.sequence_parallel": True},
        {
            "torchrun.nproc-per-node": ("open", "set parallel.dp to"),
            "tensor-model-parallel-size": ("open", "set parallel.tp"),
        },
    ),
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage 2": (
        {"parallel.dp": ABSENT, "parallel.virtual_stages": ABSENT},
        {"num-layers-per-virtual-pipeline-stage": ("lost", "set parallel.schedule")},
    ),
    "--tensor-model-parallel-size 2 --sequence-parallel": ({"parallel.dp": 4, "parallel.sequence_parallel": True}, {}),
    "--tokenizer-model $TOKENIZER --lr $LR": (
        {"optimizer.lr": ABSENT},
        {
            "tokenizer-model": ("harmless", "PREFIX.json"),
            "lr": ("open", "not set in the script: set optimizer.lr"),
        },
    ),
    "--use-checkpoint-args": ({}, {"use-checkpoint-args": ("open", "read from the checkpoint")}),
    "--data-path 0.5 $A 0.5 $B": ({"data.train": ABSENT}, {"data-path": ("open", "$A: not set in the script")}),
    "--bf16 $MORE --lr 1e-3 $EXTRA_ARGS": (
        {"optimizer.lr": 1e-3},
        {"$MORE": ("open", "not imported"), "$EXTRA_ARGS": ("open", "not imported")},
    ),
}


@pytest.mark.parametrize("arguments", CASES)
def test_arguments_together(arguments, tmp_path, capsys):
    expected, remarks = CASES[arguments]
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE} {arguments}"
    options, lost, notes, _ = imported(capsys, tmp_path, "megatron", command)
    assert {option: options.get(option, ABSENT) for option in expected} == expected
    results = {key: ("lost", why) for key, why in lost.items()} | {
        key: (kind, why) for kind, by in notes.items() for key, why in by.items()
    }
    for key, (kind, why) in remarks.items():
        assert results[key][0] == kind and why in results[key][1], results[key]


LAUNCHERS = {
    "torchrun --nproc-per-node 8 --nnodes 2": 16,
    "python -m torch.distributed.launch --nproc_per_node=4": 4,
    "deepspeed --num_gpus 8 --num_nodes 2": 16,
    "accelerate launch --num_processes 16": 16,
    "srun --nodes=2 --ntasks-per-node=8 python -u": 16,
    "srun --ntasks=32 bash -c 'torchrun --nproc-per-node 8 --nnodes $NODES": None,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_processes_of_a_launcher_give_the_data_parallel_size(launcher, tmp_path, capsys):
    end = "'" if "'" in launcher else ""
    command = f"{launcher} pretrain_gpt.py {SHAPE} --tensor-model-parallel-size 2 --micro-batch-size 1{end}"
    options = imported(capsys, tmp_path, "megatron", command)[0]
    processes = LAUNCHERS[launcher]
    assert options.get("parallel.dp") == (processes and processes // 2)


def test_arguments_after_a_comment_are_named(tmp_path, capsys):
    """bash ends a continued command at a comment, so that Megatron-LM does not get what follows."""
    (tmp_path / "train.sh").write_text(
        f"python pretrain_gpt.py {SHAPE} \\\n  # --lr 1e-3 \\\n  --bf16 \\\n  --swiglu\n"
    )
    options, _, notes, _ = imported(capsys, tmp_path, tmp_path / "train.sh")
    assert "train.precision" not in options and not options["model.gated_mlp"]
    assert "a comment ends the command" in notes["open"]["script.cut"]


def test_a_missing_parser_is_one_message(monkeypatch, capsys):
    grammar._parser.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(SystemExit, match="2"):
        main(["pretrain_gpt.py --num-layers 2 --hidden-size 8"])
    assert "pip install tree-sitter tree-sitter-bash" in capsys.readouterr().err
    grammar._parser.cache_clear()
