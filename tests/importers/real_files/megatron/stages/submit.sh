#!/bin/bash
sbatch -p ${SLURM_PARTITION} \
       --job-name=${JOB_NAME} \
       --nodes=${NNODES} \
       --export=MEGATRON_CODE_DIR,MEGATRON_PARAMS job.sh
exit 0
