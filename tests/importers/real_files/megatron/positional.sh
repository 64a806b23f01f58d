#!/bin/bash
# Usage: positional.sh CHECKPOINTS LOGS VOCAB MERGES DATA
GPUS_PER_NODE=8
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<where checkpoints go>
TENSORBOARD_LOGS_PATH=$2 #<where logs go>
VOCAB_FILE=$3 #<path>/vocab.json
MERGE_FILE=$4 #<path>/merges.txt
DATA_PATH=$5 #<path and prefix>_text_document
GPT_MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 64
    --rampup-batch-size 16 16 5000
    --train-iters 4000
    --weight-decay 0.1
    --clip-grad 1.0
    --fp16
    --lr 1.5e-4
    --lr-decay-style cosine
    --min-lr 1.5e-5
    --lr-warmup-fraction .01
    --lr-decay-iters 3000
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --data-path $DATA_PATH --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --split 949,50,1 \
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --tensorboard-dir $TENSORBOARD_LOGS_PATH
