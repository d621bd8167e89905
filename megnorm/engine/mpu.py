"""The groups in the shape in which DeepSpeed's plain engine asks for them ("model parallel unit")."""

import torch.distributed as dist

from megnorm.parallel.groups import Groups


class Mpu:
    """Least set of methods that DeepSpeed 0.19.8 calls; model parallel means tensor parallel here."""

    def __init__(self, groups: Groups):
        self.groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.dp_group

    def get_data_parallel_rank(self) -> int:
        return self.groups.at.dp

    def get_data_parallel_world_size(self) -> int:
        return self.groups.layout.dp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.tp_group

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_rank(self) -> int:
        return self.groups.at.tp

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.layout.tp

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.groups.layout.pp
