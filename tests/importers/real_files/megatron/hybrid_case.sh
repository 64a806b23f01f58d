#!/bin/bash
MODEL_SCALE="tiny" # or "big"
case "${MODEL_SCALE}" in
    "tiny")
        TENSOR_MODEL_PARALLEL_SIZE=1
        HYBRID_LAYER_PATTERN="M-M-*-M-M-*-"
        HIDDEN_SIZE=768
        NUM_ATTENTION_HEADS=12
        GLOBAL_BATCH_SIZE=32
        ;;
    "big")
        TENSOR_MODEL_PARALLEL_SIZE=4
        HYBRID_LAYER_PATTERN="M-M-M-*-M-M-M-*-"
        HIDDEN_SIZE=4096
        NUM_ATTENTION_HEADS=32
        GLOBAL_BATCH_SIZE=8
        ;;
    *)
        echo "Invalid scale"
        exit 1
        ;;
esac
DATA_PATH=$1
options=" \
       --tensor-model-parallel-size ${TENSOR_MODEL_PARALLEL_SIZE} \
       --sequence-parallel \
       --untie-embeddings-and-output-weights \
       --position-embedding-type none \
       --hybrid-layer-pattern ${HYBRID_LAYER_PATTERN} \
       --hidden-size ${HIDDEN_SIZE} \
       --num-attention-heads ${NUM_ATTENTION_HEADS} \
       --seq-length 2048 --max-position-embeddings 2048 \
       --train-samples 320000 --lr-warmup-samples 3200 \
       --data-path ${DATA_PATH} --split 99,1,0 \
       --micro-batch-size 4 --global-batch-size ${GLOBAL_BATCH_SIZE} \
       --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine \
       --disable-bias-linear --normalization RMSNorm --bf16 \
       --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${options}
