#!/bin/bash
DIR=`pwd`
SEQ_LEN=1024
MODEL_SIZE=0.35
GLOBAL_BATCH_SIZE=256
TRAIN_TOKENS=5242880000
TRAIN_ITERS=$(( ${TRAIN_TOKENS} * 3 / ${GLOBAL_BATCH_SIZE} / ${SEQ_LEN} ))
BATCH_SIZE=4
NUM_GPUS=16
EP_SIZE=64
if [[ $EP_SIZE -gt $NUM_GPUS ]]; then
    EP_PARALLEL_SIZE=$NUM_GPUS
else
    EP_PARALLEL_SIZE=$EP_SIZE
fi
CL_TOKENS=$((60 * 1000000000))
ACTIVATION_CHECKPOINT="true"
current_time=$(date "+%Y.%m.%d-%H.%M.%S")
host="${HOSTNAME}"
NAME="gpt-${MODEL_SIZE}B-gpus-${NUM_GPUS}"
if [[ $EP_SIZE -gt 1 ]]; then
    NAME="${NAME}-ep-${EP_SIZE}"
fi
OUTPUT_BASEPATH=$DIR/output
CHECKPOINT_PATH="${OUTPUT_BASEPATH}/checkpoint/${NAME}"
data_options=" \
         --vocab-file ${DIR}/vocab.json \
         --data-path ${DIR}/pile_text_document \
         --data-impl mmap"
megatron_options=" \
        --override-opt_param-scheduler \
        --adam-beta1 0.9 \
        --adam-beta2 0.95 \
        --tensor-model-parallel-size 1 \
        --moe-expert-parallel-size ${EP_PARALLEL_SIZE} \
        --num-experts ${EP_SIZE} \
        --moe-loss-coeff 0.01 \
        --moe-train-capacity-factor 1.0 \
        --init-method-std 0.014 \
        --lr-decay-tokens 300000000000 \
        --lr-warmup-tokens 375000000 \
        --micro-batch-size ${BATCH_SIZE} \
        --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --num-layers 12 \
        --hidden-size 1024 \
        --num-attention-heads 16 \
        --seq-length ${SEQ_LEN} \
        --max-position-embeddings ${SEQ_LEN} \
        --train-tokens ${TRAIN_TOKENS} \
        --train-iters ${TRAIN_ITERS} \
        --lr 2e-4 \
        --min-lr 2e-6 \
        --lr-decay-style cosine \
        --split 98,2,0 \
        --fp16 \
        --load ${CHECKPOINT_PATH} \
        --save ${CHECKPOINT_PATH}"
if [ "${ACTIVATION_CHECKPOINT}" = "true" ]; then
megatron_options="${megatron_options} \
        --checkpoint-activations"
fi
template_json="ds_config_template.json"
config_json="ds_config_${NAME}.json"
sed "s/CONFIG_BATCH_SIZE/${GLOBAL_BATCH_SIZE}/" ${template_json} \
    | sed "s/ZERO_STAGE/0/" \
	  > ${config_json}
deepspeed_options=" \
		    --deepspeed \
		    --deepspeed_config ${config_json} \
		    --pipeline-model-parallel-size 1"
if [[ $EP_SIZE -gt 1 ]]; then
deepspeed_options="${deepspeed_options} \
        --no-pipeline-parallel"
fi
run_cmd="deepspeed --num_gpus 16 ${DIR}/../../pretrain_gpt.py ${megatron_options} ${data_options} ${deepspeed_options} &> ${OUTPUT_BASEPATH}/log/${NAME}_${host}_${current_time}.log"
echo ${run_cmd}
eval ${run_cmd}
set +x
