"""Which library computes fp32 matrix products on a CPU."""

import torch
from torch import Tensor

# Relative error (Frobenius) of an fp32 product, with room; with bf16 inside it is above 1e-3.
FP32_ERROR = 2e-6


def prefer_onednn() -> bool:
    """Have torch take oneDNN for fp32 products, which is 10 to 20 % faster than its default and as accurate.

    torch's only switch for it, "medium", also lets oneDNN round to bf16 inside, which it does on processors with
    matrix units for bf16. So it is tried, and kept only where the products stay fp32. Returns whether it was.
    """
    torch.set_float32_matmul_precision("medium")
    kept = worst_error() < FP32_ERROR
    if not kept:
        torch.set_float32_matmul_precision("highest")
    return kept


def products_used(device: torch.device) -> str:
    """Which library computes fp32 matrix products, and how exactly, in words."""
    if device.type == "cuda":
        return f"cuBLAS, fp32 precision {torch.get_float32_matmul_precision()}"
    return "oneDNN, fp32 inside" if torch.get_float32_matmul_precision() == "medium" else "torch's default for fp32"


def worst_error() -> float:
    """Relative error of a linear layer's three products and of batched ones, at sizes small and large."""
    worst = 0.0
    for rows, width, out in ((16, 16, 16), (96, 64, 160), (256, 128, 192)):
        generator = torch.Generator().manual_seed(rows)
        x, w, g = (torch.randn(a, b, generator=generator) for a, b in ((rows, width), (out, width), (rows, out)))
        for a, b in ((x, w.t()), (g, w), (g.t(), x)):
            worst = max(worst, _error(a, b), _error(a.expand(3, -1, -1), b.expand(3, -1, -1)))
    return worst


def _error(a: Tensor, b: Tensor) -> float:
    right = a.double() @ b.double()
    return float(((a @ b).double() - right).norm() / right.norm())
