"""What DeepSpeed is told. Every choice that works around a fault of version 0.19.8 says so."""

from typing import Any

from megnorm.config import Config
from megnorm.plan.layout import Layout, accumulation_steps

# A limit beyond every norm: with 0 the engine would skip the gradient norm, which is reported in any case.
NO_CLIPPING = 1e30


def zero_stage(config: Config, layout: Layout) -> int:
    """The ZeRO stage that runs, which computes the same as the one asked for.

    bf16: without sharded masters DeepSpeed is wrong (gradient norm and a phantom first step), so stage 0 becomes 1.
    fp32 on one replica: stage 1 has nothing to shard, only copies of all gradients to make, so it becomes 0.
    """
    stage = config.parallel.zero_stage
    if config.train.dtype == "bf16":
        return max(stage, 1)
    return 0 if stage == 1 and layout.dp == 1 else stage


def deepspeed_settings(config: Config, layout: Layout) -> dict[str, Any]:
    """The engine's configuration for this run."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": accumulation_steps(config, layout),
        "gradient_clipping": config.train.clip or NO_CLIPPING,
        "zero_optimization": {"stage": zero_stage(config, layout), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        # A stage's ranks would each send a part of what they take for equal copies; under sp they are slices.
        "pipeline": {"pipe_partitioned": not layout.sp, "grad_partitioned": not layout.sp},
    }
    if config.train.dtype == "bf16":
        # A bf16 gradient is added to the fp32 sum, and freed, as soon as it is there.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        # Sums over replicas too: by itself DeepSpeed rounds the fp32 sums to bf16 to send them.
        settings["communication_data_type"] = "fp32"
    return settings
