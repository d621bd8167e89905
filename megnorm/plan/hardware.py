"""What one device can do, from data sheets or measured, for estimates of step time."""

import difflib
import time
from dataclasses import dataclass, replace

import numpy as np

from megnorm.config import ConfigError


@dataclass(frozen=True)
class Hardware:
    """One device and its links.

    memory: GiB as the driver reports them. tflops_bf16, tflops_fp32: dense matrix products (fp32: TF32 on GPUs).
    efficiency: share of it that large products reach. bandwidth: of device memory, GB/s. inside, across: GB/s
    that a device sends to others of its node and to other nodes. per_node: devices of a node. latency: seconds of
    a collective without data. device: which kernels run, "cuda" or "cpu".
    """

    name: str
    memory: float
    tflops_bf16: float
    tflops_fp32: float
    bandwidth: float
    inside: float
    across: float
    per_node: int = 8
    efficiency: float = 0.7
    latency: float = 15e-6
    device: str = "cuda"

    def flops(self, dtype: str) -> float:
        """FLOP/s at best."""
        return 1e12 * (self.tflops_bf16 if dtype == "bf16" else self.tflops_fp32)

    def link(self, ranks: int, stride: int) -> float:
        """Bytes/s between ``ranks`` ranks of which neighbours are ``stride`` apart."""
        return 1e9 * (self.inside if ranks * stride <= self.per_node else self.across)


# NVIDIA's data sheets (SXM, without sparsity); NVLink one way; one 200 or 400 Gbit/s adapter for each device, as
# in the DGX machines. Memory as nvidia-smi shows it.
TABLE = {
    "a100": Hardware("A100 80GB", 80.0, 312.0, 156.0, 2039.0, 300.0, 25.0),
    "h100": Hardware("H100", 79.6, 989.0, 494.0, 3350.0, 450.0, 50.0),
    "h200": Hardware("H200", 140.4, 989.0, 494.0, 4800.0, 450.0, 50.0),
    "b200": Hardware("B200", 179.1, 2250.0, 1125.0, 7700.0, 900.0, 50.0),
}


def find_hardware(name: str) -> Hardware:
    """By its name, "cpu" measured here and now. Raises ConfigError with the nearest name."""
    if name.lower() == "cpu":
        return measured_cpu()
    if name.lower() not in TABLE:
        near = difflib.get_close_matches(name.lower(), [*TABLE, "cpu"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TABLE)} and cpu"
        raise ConfigError(f"no figures for the hardware {name!r}; {hint}")
    return TABLE[name.lower()]


def with_memory(hardware: Hardware, gib: float | None) -> Hardware:
    """The same with ``gib`` GiB of memory on each device."""
    if gib is None:
        return hardware
    if not 0 < gib < 1e6:
        raise ConfigError(f"gpu-memory={gib:g} must be a number of GiB above 0")
    return replace(hardware, memory=gib)


def measured_cpu(budget: float = 0.2) -> Hardware:
    """A process of this machine: a product of two matrices and a copy are timed with numpy's threads. bf16 counts
    as fp32, since few CPUs are faster with it; processes exchange data by copies in memory."""
    a = np.ones((512, 512), np.float32)
    product = 2 * 512**3 / _best(lambda: a @ a, budget) / 1e12
    data = np.ones(2**24, np.uint8)
    copy = 2 * data.nbytes / _best(data.copy, budget) / 1e9
    return Hardware("CPU, measured", _memory_gib(), product, product, copy, copy / 4, copy / 4, per_node=1024,
                    efficiency=0.8, latency=1e-4, device="cpu")


def _best(work, budget: float) -> float:
    """Seconds of the fastest of several runs."""
    best, start = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - start < budget:
        before = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - before)
    return best


def _memory_gib() -> float:
    import psutil

    return psutil.virtual_memory().total / 2**30
