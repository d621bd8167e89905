"""Gradient norm and clipping for fp32 without ZeRO, where DeepSpeed's own is wrong.

DeepSpeed 0.19.8 averages norms over replicas, counts tied copies twice and takes the pipeline rank for the
tensor rank (runtime/utils.py:394-419), then discards the number.
"""

import types

import torch
import torch.distributed as dist

from megnorm.parallel.groups import Groups


def install(engine, groups: Groups) -> None:
    """Replace the engine's clipping by one over the whole logical gradient, each element counted once."""

    def clip_fp32_gradients(self) -> None:
        norm = gradient_norm(self.module.parameters(), groups)
        self._global_grad_norm = norm
        factor = self.gradient_clipping() / (norm + 1e-6)
        if factor < 1.0:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    engine.clip_fp32_gradients = types.MethodType(clip_fp32_gradients, engine)


def gradient_norm(parameters, groups: Groups) -> float:
    """Root of the sum of squares over all pipeline stages and tensor ranks; replicas' gradients are equal."""
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None and counts_here(parameter):
            # By rows first: torch's fp32 sum over a large tensor is off by 1e-3, its fp64 norm is 20 times slower.
            rows = torch.linalg.vector_norm(parameter.grad, dim=-1)
            total += torch.linalg.vector_norm(rows, dtype=torch.float64).square()
    total = torch.as_tensor(total, dtype=torch.float64, device=groups.device)
    dist.all_reduce(total, group=groups.model_group)
    return float(total.sqrt())


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts the parameter: the first of the tensor ranks that hold this part of it; the
    second copy of a tied weight counts nowhere."""
    if getattr(parameter, "ds_pipe_replicated", False) or getattr(parameter, "megnorm_anchor", False):
        return False
    return parameter.sharding.first
