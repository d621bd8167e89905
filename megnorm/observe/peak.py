"""What one device could do at best, in TFLOP/s: the denominator of MFU."""

import time
from typing import TYPE_CHECKING

from megnorm.config import Config
from megnorm.plan.hardware import TABLE

if TYPE_CHECKING:
    import torch

# Dense bf16 TFLOP/s of tensor cores from NVIDIA's data sheets (without sparsity), by what the device's name contains,
# the first that fits; TF32 is half of it. The cards for PCI Express have fewer than those that the plan knows.
GPUS = (("H200 NVL", 835.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0),
        *((name.upper(), hardware.tflops_bf16) for name, hardware in TABLE.items()))


def peak_tflops(config: Config, device: "torch.device") -> tuple[float | None, str]:
    """(TFLOP/s of one device in the run's dtype, where the number is from); None for an unknown GPU.

    First ``observe.peak_tflops``, then the table by the GPU's name; on a CPU a product of two matrices is
    timed with this process's threads, for at most about 0.1 s.
    """
    import torch

    if config.observe.peak_tflops is not None:
        return config.observe.peak_tflops, "observe.peak_tflops"
    if device.type == "cpu":
        return _measure(config.train.dtype), f"measured: a {config.train.dtype} matrix product on this CPU"
    name = torch.cuda.get_device_name(device)
    known = table_tflops(name, config.train.dtype)
    if known is None:
        return None, f"no figure known for {name}: set observe.peak_tflops to see MFU"
    return known, f"{name}, dense {'TF32' if config.train.dtype == 'fp32' else 'bf16'} by its data sheet"


def table_tflops(name: str, dtype: str) -> float | None:
    """The table's figure for a GPU by the name that CUDA gives it."""
    for part, bf16 in GPUS:
        if part.lower() in name.lower():
            return bf16 / 2 if dtype == "fp32" else bf16
    return None


def _measure(dtype: str, size: int = 384, budget: float = 0.08) -> float:
    """The best of several products of two [size, size] matrices; the first one also warms up."""
    import torch

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    a = torch.ones(size, size, dtype=kind)
    best, start = float("inf"), time.perf_counter()
    with torch.no_grad():
        while best == float("inf") or time.perf_counter() - start < budget:
            before = time.perf_counter()
            torch.mm(a, a)
            best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best / 1e12
