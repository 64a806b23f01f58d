#!/bin/bash
set -ex
BASE_PATH=./base
DS_CONFIG=${BASE_PATH}/deepspeed.json
DATASET="0.3 ${BASE_PATH}/news_text 0.7 ${BASE_PATH}/books_text"
TP=2
PP=2
ZERO_STAGE=1
HIDDEN_SIZE=1024 # of the large one: 4096
NUM_LAYERS=16
NUM_HEADS=16
NUM_KV_HEADS=4
SEQ_LENGTH=1024
MICRO_BATCH_SIZE=4
GLOBAL_BATCH_SIZE=32
# activation_checkpoint="true"
activation_checkpoint="false"
LOG_TO_WANDB=0
WANDB_ARGS=
if [ $LOG_TO_WANDB -eq 1 ]
then
WANDB_ARGS="\
       --wandb-project llama \
       "
fi
# --hidden-dropout 0.1 \
# --normalization layernorm \
######################################
cat <<EOT > $DS_CONFIG
{
  "train_batch_size" : $GLOBAL_BATCH_SIZE,
  "zero_optimization": { "stage": $ZERO_STAGE }
}
EOT
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
  ds_args="--recompute-granularity full --recompute-method uniform ${ds_args}"
fi
DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1 --node_rank 0"
torchrun $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TP \
       --pipeline-model-parallel-size $PP \
       --num-layers $NUM_LAYERS \
       --hidden-size $HIDDEN_SIZE \
       --ffn-hidden-size 2816 \
       --num-attention-heads $NUM_HEADS \
       --num-key-value-heads $NUM_KV_HEADS \
       --micro-batch-size $MICRO_BATCH_SIZE \
       --global-batch-size $GLOBAL_BATCH_SIZE \
       --seq-length $SEQ_LENGTH \
       --max-position-embeddings $SEQ_LENGTH \
       --train-iters 2500 \
       --data-path $DATASET \
       --data-impl mmap \
       --split 949,50,1 \
       --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200 \
       --weight-decay 0.1 --clip-grad 1 --adam-beta1 0.9 --adam-beta2 0.95 \
       --bf16 \
       --attention-dropout 0 \
       --hidden-dropout 0 \
       --use-rotary-position-embeddings \
       --untie-embeddings-and-output-weights \
       --swiglu \
       --normalization rmsnorm \
       --disable-bias-linear \
       $WANDB_ARGS \
       $ds_args
