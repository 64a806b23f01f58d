#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
basepath=$(cd `dirname $0`; cd ../../; pwd)
NPUS_PER_NODE=8
NNODES=1
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
# please fill these path configurations
CKPT_SAVE_DIR="your model save ckpt path"
DATA_PATH="your data path"
TP=2
EP=4
CP=1
CP_TYPE='ulysses_cp_algo'
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES
"
MLA_ARGS="
    --multi-latent-attention \
    --qk-pos-emb-head-dim 32 \
    --qk-head-dim 64 \
    --q-lora-rank 256 \
    --kv-lora-rank 128 \
    --v-head-dim 64 \
    --qk-layernorm \
    --mla-fa-without-pad \
"
MOE_ARGS="
    --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall \
    --first-k-dense-replace 1 \
    --moe-layer-freq 1 \
    --n-shared-experts 1 \
    --num-experts 16 \
    --moe-router-topk 4 \
    --moe-ffn-hidden-size 512 \
    --moe-router-load-balancing-type none \
    --moe-router-topk-scaling-factor 2.5 \
    --norm-topk-prob \
    --moe-router-score-function sigmoid \
    --moe-router-enable-expert-bias \
    --moe-router-dtype fp32 \
"
ROPE_ARGS="
    --rope-scaling-factor 32 \
    --rope-scaling-original-max-position-embeddings 4096 \
    --rope-scaling-type yarn
"
GPT_ARGS="
    --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
    --no-shared-storage \
    --use-distributed-optimizer \
    --use-flash-attn \
    --use-mcore-models \
    --tensor-model-parallel-size ${TP} \
    --expert-model-parallel-size ${EP} \
    --context-parallel-size ${CP} \
    --context-parallel-algo ${CP_TYPE} \
    --sequence-parallel \
    --num-layers 4 \
    --hidden-size 1024 \
    --ffn-hidden-size 2816 \
    --num-attention-heads 16 \
    --seq-length 4096 \
    --max-position-embeddings 4096 \
    --micro-batch-size 1 \
    --global-batch-size 16 \
    --make-vocab-size-divisible-by 1 \
    --lr 1.0e-5 \
    --train-iters 2000 \
    --lr-decay-style cosine \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --use-fused-rotary-pos-emb \
    --use-rotary-position-embeddings \
    --use-fused-swiglu \
    --swiglu \
    --use-fused-rmsnorm \
    --bf16
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
  $GPT_ARGS \
  $MLA_ARGS \
  $ROPE_ARGS \
  $MOE_ARGS \
  --data-path "$DATA_PATH" \
  --split 100,0,0 \
  --save "$CKPT_SAVE_DIR" \
  --distributed-backend nccl \
  | tee logs/train.log
