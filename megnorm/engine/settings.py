"""What DeepSpeed is told. Every choice that works around a fault of version 0.19.8 says so."""

from typing import Any

from megnorm.config import Config
from megnorm.plan.layout import Layout, accumulation_steps

# A limit beyond every norm: with 0 the engine would skip the gradient norm, which is reported in any case.
NO_CLIPPING = 1e30


def zero_stage(config: Config) -> int:
    """The ZeRO stage that runs. bf16 without sharded masters is wrong in DeepSpeed (gradient norm and a
    phantom first step), so stage 0 in bf16 becomes stage 1, which computes the same."""
    stage = config.parallel.zero_stage
    return 1 if config.train.dtype == "bf16" and stage == 0 else stage


def deepspeed_settings(config: Config, layout: Layout) -> dict[str, Any]:
    """The engine's configuration for this run."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": accumulation_steps(config, layout),
        "gradient_clipping": config.train.clip or NO_CLIPPING,
        "zero_optimization": {"stage": zero_stage(config), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        # A stage's ranks would each send a part of what they take for equal copies; under sp they are slices.
        "pipeline": {"pipe_partitioned": not layout.sp, "grad_partitioned": not layout.sp},
    }
    if config.train.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
