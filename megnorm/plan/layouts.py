"""Every layout of a number of devices: which fit their memory, in which order of speed, and why others don't."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megnorm.config import Config, ConfigError
from megnorm.plan.estimate import StepTime, step_time
from megnorm.plan.hardware import Hardware
from megnorm.plan.layout import Layout, check_layout, make_layout
from megnorm.plan.memory import Memory, Shape, worst_rank

USABLE = 0.92  # share of a device's memory; CUDA, NCCL and fragmentation take the rest


@dataclass(frozen=True)
class Candidate:
    """A layout that the model, the batch and the engine take, with what it needs and how fast it may be."""

    config: Config
    layout: Layout
    memory: Memory
    time: StepTime

    @property
    def overrides(self) -> str:
        """What to write behind ``megnorm train CONFIG``."""
        parallel = self.config.parallel
        values = [f"parallel.{name}={getattr(parallel, name)}" for name in ("tp", "pp", "cp", "zero_stage")]
        values += [f"parallel.ep={parallel.ep}"] * (parallel.ep > 1)
        values += ["parallel.sp=true"] * parallel.sp
        values += [f"parallel.recompute={parallel.recompute}"] * (parallel.recompute != "none")
        return " ".join([*values, f"train.micro_batch={self.config.train.micro_batch}"])


@dataclass(frozen=True)
class Layouts:
    """fitting: fastest first. too_large: least memory first. refused: reasons with the number of layouts."""

    fitting: list[Candidate]
    too_large: list[Candidate]
    refused: Counter

    @property
    def count(self) -> int:
        """Layouts looked at."""
        return len(self.fitting) + len(self.too_large) + sum(self.refused.values())


def search_layouts(config: Config, gpus: int, hardware: Hardware) -> Layouts:
    """Try tp, sp, pp, cp, ep, ZeRO stage, recomputation and micro batch. Raises ConfigError for a wrong number."""
    if gpus < 1:
        raise ConfigError(f"gpus={gpus} must be at least 1")
    limit = hardware.memory * 2**30 * (USABLE if hardware.device == "cuda" else 1.0)
    fitting, too_large, refused = [], [], Counter()
    shape = Shape(config)
    for tried in _variants(config, gpus):
        try:
            layout = make_layout(tried, gpus)
            check_layout(tried, layout)
        except ConfigError as error:
            refused[str(error)] += 1
            continue
        memory = worst_rank(tried, layout, hardware.device, shape)
        candidate = Candidate(tried, layout, memory, step_time(tried, layout, hardware, shape))
        (fitting if memory.total <= limit else too_large).append(candidate)
    fitting.sort(key=lambda candidate: candidate.time.total)
    too_large.sort(key=lambda candidate: candidate.memory.total)
    return Layouts(fitting, too_large, refused)


def _variants(config: Config, gpus: int) -> Iterator[Config]:
    """Configurations that differ in layout and micro batch; stages as given hold for their own pp alone."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    stages = (1, 2, 3) if config.train.dtype == "bf16" else (0, 1, 2, 3)
    experts = config.model.moe.experts if config.model.moe else 1
    for tp, pp, cp in product(divisors, divisors, divisors):
        if gpus % (tp * pp * cp):
            continue
        replicas = gpus // (tp * pp * cp)
        cuts = (False, True) if tp > 1 else (False,)
        slices = [ep for ep in divisors if experts % ep == 0 and cp * replicas % ep == 0]
        for micro_batch, ep in product(_powers(config.train.global_batch // replicas), slices):
            for sp, zero, again in product(cuts, stages, ("none", "selective", "full")):
                yield _changed(config, micro_batch, {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "sp": sp,
                                                     "zero_stage": zero, "recompute": again})


def _powers(largest: int) -> list[int]:
    """1, 2, 4 ... up to ``largest``, at least 1."""
    return [2**i for i in range(max(largest, 1).bit_length())]


def _changed(config: Config, micro_batch: int, values: dict[str, Any]) -> Config:
    given = config.parallel.stages
    stages = given if given is not None and len(given) == values["pp"] else None
    parallel = config.parallel.model_copy(update={**values, "dp": None, "stages": stages})
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    return config.model_copy(update={"parallel": parallel, "train": train})
