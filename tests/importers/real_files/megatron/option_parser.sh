#!/bin/bash
CHECKPOINT_PATH="NOT_GIVEN"
CLUSTER_FILE=""
while [[ $# -gt 0 ]]; do
    case $1 in
        --checkpoint-path)
            CHECKPOINT_PATH="$2"
            shift 2
            ;;
        --cluster-file) CLUSTER_FILE="$2"; shift 2 ;;
        -h|--help)
            echo "Usage: $0 [OPTIONS]"
            echo "  --checkpoint-path PATH          (default: none)"
            exit 0
            ;;
        *)
            echo "Unknown option: $1"
            exit 1
            ;;
    esac
done
if [ ! -d "$CHECKPOINT_PATH" ]; then
    echo "No such directory: $CHECKPOINT_PATH"
    exit 1
fi
GPUS_PER_NODE=4
NUM_NODES=1
if [ -n "$CLUSTER_FILE" ]; then
    if [ ! -f "$CLUSTER_FILE" ]; then
        echo "Default cluster"
    else
        source "$CLUSTER_FILE"
    fi
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
PP_SIZE=${WORLD_SIZE}
MODEL_ARGS=(
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 32 --kv-channels 16
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-base 10000 --rotary-percent 1.0
    --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable
    --window-size 127,0 --window-attn-skip-freq 2
    --untie-embeddings-and-output-weights
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-ffn-hidden-size 512
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
python -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${MOE_ARGS[@]} \
    --micro-batch-size 1 --global-batch-size 16 --train-iters 500 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size ${PP_SIZE} --sequence-parallel \
    --mock-data --save $CHECKPOINT_PATH --use-distributed-optimizer
