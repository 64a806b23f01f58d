"""Pure functions between linear layers, eager or compiled (`train.compile`).

Compilation is regional: a region contains no collective, no weight-gradient queue and no gather, so that
compiling it changes neither the communication nor its order. Linear layers, attention and the loss are not
compiled, because they are matmuls with communication around them. A region that cannot be compiled runs
eagerly, and a line is printed. Compiled code fuses additions: results agree within 1e-4, but not bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite_kernels import activation, attention_gate, norm, rotary, xielu


class _Compiled:
    """Function that is compiled at its first call, and runs eagerly if that fails."""

    def __init__(self, function: Callable[..., Any]):
        self._eager = function
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._chosen is not None:
            return self._chosen(*args, **options)
        import torch

        compiled = torch.compile(self._eager, dynamic=False)
        try:
            result = compiled(*args, **options)
        except Exception as error:  # a missing compiler or an unsupported operation: slower, but correct
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(
                f"train.compile: {self._eager.__name__} could not be compiled and runs eagerly: {reason}",
                flush=True,
            )
            self._chosen = self._eager
            return self._eager(*args, **options)
        self._chosen = compiled
        return result


class CompiledOps:
    """Regions of a model by name, as compiled or eager functions with the same arguments."""

    def __init__(self, compiled: bool = False):
        def region(function: Callable[..., Any]) -> Callable[..., Any]:
            return _Compiled(function) if compiled else function

        self.rms_norm = region(norm.rms_norm)
        self.add_rms_norm = region(norm.add_rms_norm)
        self.rms_norm_backward = region(norm.rms_norm_backward)
        self.layer_norm = region(norm.layer_norm)
        self.layer_norm_backward = region(norm.layer_norm_backward)
        self.gated_forward = region(activation.gated_forward)
        self.gated_backward = region(activation.gated_backward)
        self.plain_forward = region(activation.plain_forward)
        self.plain_backward = region(activation.plain_backward)
        self.xielu_forward = region(xielu.xielu_forward)
        self.xielu_backward = region(xielu.xielu_backward)
        self.gate_output = region(attention_gate.gate_output)
        self.gate_output_backward = region(attention_gate.gate_output_backward)
        self.split_rotary = region(rotary.split_rotary)
        self.split_rotary_backward = region(rotary.split_rotary_backward)
