echo "Loading common options"
COMMON_OPTIONS="\
    --tensor-model-parallel-size $TP  \
    --pipeline-model-parallel-size $PP  \
    --${PRECISION:-bf16} \
    --adam-beta1 0.9 \
    --adam-beta2 ${ADAM_BETA2:-0.95} \
    "
if [ ${LOWER_PRECISION:-false} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --no-gradient-accumulation-fusion"
else
    COMMON_OPTIONS="${COMMON_OPTIONS}"
fi
if [ ${RECOMPUTE:-true} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --recompute-activations"
fi
