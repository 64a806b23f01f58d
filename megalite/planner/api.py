"""The planner's interface for a given run: its devices, memory, time, and recomputation within a budget.

Code outside of the planner imports from this module, from `plans`, which searches for layouts, and from
`drawing`. Every other module of the planner is internal.
"""

from megalite.planner.budget.decision import (
    budget_bytes,  # train.memory_budget in bytes
    budget_table,  # a decision as lines of text
    decide_recomputation,  # the operations that each layer recomputes
    resolve_budget,  # the configuration with these operations in place of a budget
)
from megalite.planner.cost.expert_exchange import (
    describe_worst_load,  # the most imbalanced load of experts, as a sentence
    worst_expert_bytes,  # its activations per layer and microbatch
)
from megalite.planner.cost.state_exchange import (
    describe_state_exchange,  # what blocks with a state send over cp, as lines of text
)
from megalite.planner.hardware.constants import prediction_interval  # contains 80 % of measured step times
from megalite.planner.hardware.devices import (
    Device,  # speeds, memory and links of a GPU or CPU
    HardwareError,  # unknown device, or invalid description of one
    Link,  # bandwidth and latency between devices
    find_device,  # by its name or YAML file
    find_device_by_driver_name,  # by the name that CUDA reports
    known_devices,  # the names in the hardware table
    peak_flops,  # dense FLOP/s at a precision
    read_device,  # from a row of the hardware table
    read_link,  # from its name or its values
)
from megalite.planner.memory.estimate import (
    RankMemory,  # peak memory of a rank
    estimate,  # of every rank
    resolve_layout,  # the configuration with dp and the partition filled in
)
from megalite.planner.memory.states import (
    DeviceType,  # "cuda" or "cpu"
    Sharing,  # the ranks that share the buckets of a domain
    checkpoint_bytes,  # tensors of a checkpoint
    copying_bytes,  # CPU memory of copies of the state, per rank
    model_states,  # weights, gradients and optimizer state of a rank
)
from megalite.planner.report.fp8_effect import (
    fp8_effect_of_run,  # what fp8 changes in the predicted step time, as lines of text
)
from megalite.planner.time.prediction import (
    device_of_run,  # the device that a run is predicted for
    step_seconds,  # predicted step time
    sum_by_stage,  # costs of units, summed over the units of each stage
    unit_flops,  # FLOPs per token of the embedding, each layer and the head
)
from megalite.planner.time.traffic import traffic  # bytes sent per step over each axis

__all__ = [
    "Device",
    "DeviceType",
    "HardwareError",
    "Link",
    "RankMemory",
    "Sharing",
    "budget_bytes",
    "budget_table",
    "checkpoint_bytes",
    "copying_bytes",
    "decide_recomputation",
    "describe_state_exchange",
    "describe_worst_load",
    "device_of_run",
    "estimate",
    "find_device",
    "find_device_by_driver_name",
    "fp8_effect_of_run",
    "known_devices",
    "model_states",
    "peak_flops",
    "prediction_interval",
    "read_device",
    "read_link",
    "resolve_budget",
    "resolve_layout",
    "step_seconds",
    "sum_by_stage",
    "traffic",
    "unit_flops",
    "worst_expert_bytes",
]
