"""Gradient norm and clipping where DeepSpeed's own are wrong; its ZeRO 1 to 3 in fp32, and 2 and 3 in bf16, are right.

fp32 without ZeRO: DeepSpeed 0.19.8 averages norms over replicas, counts tied copies twice and takes the pipeline
rank for the tensor rank (runtime/utils.py:394-419), then discards the number. bf16 weights with fp32 masters
(BF16_Optimizer): it sums the squares of a whole tensor in fp32, which torch does on a CPU with an error of 1e-5 for
a million elements and 1e-3 for 24 millions, and counts a bias of an expert on every tensor-parallel rank.
"""

import types

import torch
import torch.distributed as dist

from megnorm.parallel.groups import Groups

ROW = 4096


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
    """Root of the sum of squares over the ranks of one whole model; the other models' gradients are equal."""
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None and counts_here(parameter) and groups.accounts_for(parameter.sharding):
            total += torch.linalg.vector_norm(norms_of_rows(parameter.grad), dtype=torch.float64).square()
    total = torch.as_tensor(total, dtype=torch.float64, device=groups.device)
    dist.all_reduce(total, group=groups.model_group)
    return float(total.sqrt())


def norms_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Norms of the rows into which x is cut: their norm is x's. Sums of a row are exact enough in fp32, while the
    fp64 norm of a large tensor takes 20 times as long."""
    flat = x.flatten()
    whole = flat.numel() // ROW * ROW
    last = torch.linalg.vector_norm(flat[whole:])
    return torch.cat([torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=-1), last[None]])


def sum_by_rows(optimizer) -> None:
    """Let a BF16_Optimizer take its norms from the norms of rows of what counts here."""
    tensors = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False):
        if for_clipping:
            return tensors(for_clipping=True)
        dense, experts = [], {}
        for group, members, gradients in zip(optimizer.optimizer.param_groups, optimizer.bf16_groups,
                                             optimizer.fp32_groups_gradients, strict=True):
            found = experts.setdefault(group["name"], []) if group["moe"] else dense
            found += [norms_of_rows(x) for p, x in zip(members, gradients, strict=True) if counts_here(p)]
        nothing = [torch.zeros(1, device=optimizer.fp32_groups_gradients_flat[0].device)]  # it can't sum over no tensor
        return dense or nothing, {group: found or nothing for group, found in experts.items()}

    optimizer.get_grads_for_norm = get_grads_for_norm


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts the parameter: the first of the tensor ranks that hold this part of it; the
    second copy of a tied weight counts nowhere."""
    if getattr(parameter, "ds_pipe_replicated", False) or getattr(parameter, "megnorm_anchor", False):
        return False
    return parameter.sharding.first
