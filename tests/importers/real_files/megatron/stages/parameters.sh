#!/bin/bash
export SLURM_PARTITION=<the partition, given to -p>
export MEGATRON_CODE_DIR=<directory of the code>
MEGATRON_DATA=<prefix of the data>
export MEGATRON_PARAMS=" ${MEGATRON_EXTRA_PARAMS} \
	--tensor-model-parallel-size ${TP} \
	--pipeline-model-parallel-size ${PP} \
	--micro-batch-size ${MBS} \
	--global-batch-size ${GBS} \
        --num-layers ${NLS} \
        --hidden-size ${HS} \
        --num-attention-heads ${NAH} \
	--DDP-impl ${DDP} \
	--data-path ${MEGATRON_DATA} \
        --seq-length 1024 \
        --max-position-embeddings 1024 \
        --train-iters 400 \
        --lr-decay-iters 400 \
        --lr 0.0001 \
	--min-lr 0.00001 \
        --lr-decay-style cosine \
        --lr-warmup-fraction 0.01 \
        --split 969,30,1 \
        --fp16 \
	--loss-scale 4096 "
