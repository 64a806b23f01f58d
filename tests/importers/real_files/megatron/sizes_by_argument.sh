#!/bin/bash
set -e
ENV=$1
CURRENT_DIR="$( cd "$( dirname "$0" )" && pwd )"
MEGATRON_PATH=$( dirname $( dirname ${CURRENT_DIR}))
if [ -z ${MP_AC_LAYERS} ];then
    MP_AC_LAYERS=1
fi
if [ $ENV = local ]; then
    MASTER_ADDR=localhost
    NNODES=1
    NODE_RANK=0
    GPUS_PER_NODE=8
elif [ $ENV = cluster ]; then
    NNODES=${WORLD_SIZE}
    NODE_RANK=${RANK}
    GPUS_PER_NODE=${NPROC:-8}
fi
MODEL_SIZE=$2
BATCH_SIZE=$3
GLOBAL_BATCH_SIZE=$4
LR=$5
SEQ_LEN=$6
TP=$7
PP=$8
SP=$9
DO=${10}
AC=${11}
DATASET_PATH=${12}
TRAIN_TOKENS=${13}
OUTPUT_BASEPATH=${14}
if [ $MODEL_SIZE = 1B ]; then
    NUM_LAYERS=16
    HIDDEN_SIZE=2048
    NUM_ATTENTION_HEADS=16
    INTERMEDIATE_SIZE=5632
    gqa_options=" \
                --group-query-attention \
                --num-query-groups 8"
    tie_option=""
    moe_options=""
elif [ $MODEL_SIZE = A1B ]; then
    NUM_LAYERS=24
    HIDDEN_SIZE=1024
    NUM_ATTENTION_HEADS=16
    INTERMEDIATE_SIZE=4096
    gqa_options=" \
                --group-query-attention \
                --num-query-groups 4"
    tie_option=" \
            --untie-embeddings-and-output-weights \
            "
    moe_options=" \
        --moe-grouped-gemm \
        --moe-router-topk 4 \
        --num-experts 32 \
        --moe-ffn-hidden-size 512 \
        --moe-router-load-balancing-type aux_loss \
        --moe-aux-loss-coeff 0.001 \
        --moe-layer-freq '([1]*24)' \
        "
fi
if [ -z ${MP_VP} ]; then
    vp_option=""
else
    vp_option=" \
        --num-layers-per-virtual-pipeline-stage ${MP_VP}"
fi
TP_COMM_OVERLAP=$(( ($TP > 1) ? 1 : 0 ))
comm_overlap_option="\
    --overlap-grad-reduce"
if [ $TP_COMM_OVERLAP -eq 1 ]; then
    comm_overlap_option="\
        --tp-comm-overlap \
        --overlap-grad-reduce"
fi
if [ $AC = full ]; then
    _check=$(( ($NUM_LAYERS / $PP) % ${MP_AC_LAYERS} ))
    if [ $_check != 0 ]; then
        echo "layers of a rank are no multiple of the recomputed ones."
        exit -1
    fi
    activation_checkpoint_options=" \
		    --recompute-method uniform \
            --recompute-num-layers ${MP_AC_LAYERS} \
		    --recompute-granularity full"
elif [ $AC = sel ]; then
    activation_checkpoint_options=" \
        --recompute-activations"
else
    activation_checkpoint_options=" \
    "
fi
if [ $DO = true ]; then
    do_option=" \
		    --use-distributed-optimizer"
elif [ $DO = false ]; then
    do_option=" \
                    "
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_option=" \
		    --sequence-parallel"
elif [ $SP = false ]; then
    sp_option=" \
                    "
fi
TRAIN_ITERS=$(( ${TRAIN_TOKENS} / ${GLOBAL_BATCH_SIZE} / ${SEQ_LEN} ))
NAME="pretrain-${MODEL_SIZE}-tp-${TP}"
SAVED="${OUTPUT_BASEPATH}/checkpoint/${NAME}"
find -L ${DATASET_PATH} -maxdepth 1 -type f -name "*.json" -print0 | xargs -0 cp -t ${SAVED}
megatron_options="  \
        --save ${SAVED} \
        --lr ${LR} \
        --min-lr 1e-6 \
        --lr-decay-style cosine \
        --lr-decay-iters ${TRAIN_ITERS} \
        --train-iters ${TRAIN_ITERS} \
        --micro-batch-size ${BATCH_SIZE} \
        --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTENTION_HEADS} \
        --ffn-hidden-size ${INTERMEDIATE_SIZE} \
        --kv-channels 128 \
        --seq-length ${SEQ_LEN} \
        --max-position-embeddings 8192 \
        --max-padding-length ${SEQ_LEN} \
        --padded-vocab-size 32000 \
        --data-path ${DATASET_PATH} \
        --split 99,1,0 \
        --tensor-model-parallel-size ${TP} \
        --pipeline-model-parallel-size ${PP} \
        --swiglu \
        --normalization RMSNorm \
        --qk-layernorm \
        --use-rotary-position-embeddings \
        --rotary-base 1000000 \
        --disable-bias-linear \
        --attention-dropout 0.0 --hidden-dropout 0.0 \
        --bf16
        "
run_cmd="torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK pretrain_model.py
 ${megatron_options} ${activation_checkpoint_options} \
 ${do_option} ${sp_option} ${moe_options} ${vp_option} ${gqa_options} ${tie_option} ${comm_overlap_option}"
echo ${run_cmd}
eval ${run_cmd}
set +x
