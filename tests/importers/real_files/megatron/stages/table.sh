#!/bin/bash
# Options: small, large
MODEL_SIZE=large
if [ ${MODEL_SIZE} == "small" ]; then
    TP=1
    PP=1
    MBS=8
    GBS=64
    NLS=12
    HS=768
    NAH=12
    DDP=torch
    NNODES=1
    MEGATRON_EXTRA_PARAMS="--activations-checkpoint-method uniform "
elif [ ${MODEL_SIZE} == "large" ]; then
    TP=4
    PP=4
    MBS=2
    GBS=96
    NLS=24
    HS=2048
    NAH=16
    DDP=local
    NNODES=4
    MEGATRON_EXTRA_PARAMS="--activations-checkpoint-method uniform --num-layers-per-virtual-pipeline-stage 3 "
else
    echo "Invalid configuration"
    exit 1
fi
export JOB_NAME=table_${MODEL_SIZE}
. `pwd`/parameters.sh
. `pwd`/submit.sh
exit 0
