#!/bin/bash
TP=${TP:-1}
PP=${PP:-2}
SCRIPT_PATH="${BASH_SOURCE[0]}"
source $(dirname $SCRIPT_PATH)/common.sh
TRAINING_BATCH_SIZE=${TRAINING_BATCH_SIZE:-64}
ENV_DEPENDENT="\
  --micro-batch-size ${MICRO_BATCH_SIZE:-1} \
  --global-batch-size $TRAINING_BATCH_SIZE \
  --grpo-group-size ${GRPO_GROUP_SIZE:-16} \
  --langrl-env-config $ENV_CONFIG "
MODEL_OPTIONS="\
  --seq-length 4096 \
  --pretrained-checkpoint $CHECKPOINT \
  --num-layers 12 \
  --hidden-size 1024 \
  --ffn-hidden-size 3072 \
  --num-attention-heads 16 \
  --max-position-embeddings 4096 \
  --group-query-attention \
  --num-query-groups 8 \
  --normalization RMSNorm \
  --position-embedding-type rope \
  --swiglu \
  --disable-bias-linear \
  --lr 1e-6 \
  "
