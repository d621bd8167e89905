"""Join the process group quietly, on whatever device there is."""

import contextlib
import datetime
import io
import logging
import warnings

import torch
import torch.distributed as dist

from megnorm.engine.products import prefer_onednn


def device_for(local_rank: int) -> torch.device:
    """The accelerator of this rank, or the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def start(device: torch.device, timeout_seconds: int) -> None:
    """Join the default process group described by the environment (or already joined) and quiet DeepSpeed."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        prefer_onednn()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(seconds=timeout_seconds))
    with quiet():
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        # Its shared-memory collective would be compiled here, with a C++ compiler that need not be there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_init_required=False)


def finish() -> None:
    """Leave the process group; without this a rank in eight aborted at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def quiet():
    """Keep what a library prints to standard output from the console; errors are raised as ever."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
