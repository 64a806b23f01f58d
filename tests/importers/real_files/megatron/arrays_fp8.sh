#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=${1:-"ckpt/small_llama"}
TOKENIZER_ARG=${2:-"MOCK"}
DATA_ARG=${3:-"MOCK"}
GPUS_PER_NODE=8
NUM_NODES=1
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
PRETRAIN_SCRIPT_PATH="pretrain_gpt.py"
TP_SIZE=2
CP_SIZE=1
DTYPE="fp8"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 12
    --hidden-size 1024
    --ffn-hidden-size 3584
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 64
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type rope
    --rotary-base 500000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 32
    --train-samples 64000
    --lr-decay-samples 64000
    --lr-warmup-samples 640
    --lr 2e-4
    --min-lr 2e-5
    --decoupled-lr 3e-4      # rates of embedding and head
    --lr-decay-style cosine
    --bf16
    --grad-reduce-in-bf16
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 512"
    )
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    --sequence-parallel
)
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
DATA_ARGS_LIST=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 32000"
        "--split '99,1,0'"
    )
else
    DATA_ARGS_LIST+=("--data-path $DATA_ARG" "--tokenizer-model $TOKENIZER_ARG")
fi
if [ ! -f "$PRETRAIN_SCRIPT_PATH" ]; then
    echo "pretrain_gpt.py is not here"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} \
    "$PRETRAIN_SCRIPT_PATH" \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS_LIST[@]} \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --eval-interval 100 --eval-iters 32
