#!/usr/bin/env bash
set -exuo pipefail
IFS=$'\n\t'
LEADER=$1
shift
RANK=$1
shift
export NCCL_ALGO=Ring,Tree
pip install '.[train]'
NAME=${TASK_NAME// /_}
RUN_NAME=$NAME-$(date -u +"%Y%m%d_%H%M%S")
torchrun \
  --nnodes "${REPLICA_COUNT}:${REPLICA_COUNT}" \
  --nproc-per-node 8 \
  --rdzv_endpoint "${LEADER}:29400" \
  --node_rank "${RANK}" \
  --rdzv_conf 'read_timeout=420' \
  scripts/train.py \
    configs/model-1b.yaml \
      --run_name=$RUN_NAME \
      --fsdp.sharding_strategy=HYBRID_SHARD \
      '--load_path=${path.last_checkpoint:${remote_folder}}' \
      --device_train_microbatch_size=2 \
      --optimizer.learning_rate=9.0e-4
