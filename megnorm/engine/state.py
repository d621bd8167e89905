"""Read and write the training state of a DeepSpeed engine, parameter by parameter: fp32 master and moments.

DeepSpeed keeps it in another form for each engine, precision and ZeRO stage. Here all of them are one form: a
*fragment*, the stretch of a flattened parameter that this rank holds inside some flat tensor for which the
base optimizer keeps moments of the same shape. Offload to CPU or NVMe is not covered.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import Constant, Sharding, kept_states, sharding_of

MASTER = "master"


class _Fragment(NamedTuple):
    """``numel`` elements at ``at`` of ``flat`` are those at ``start`` of the flattened parameter."""

    flat: Tensor
    at: int
    start: int
    numel: int
    group: dist.ProcessGroup | None  # the ranks that hold the other fragments; None: this is the whole


def local_parameters(engine) -> list[nn.Parameter]:
    """The parameters with state of their own on this rank, in an order that is equal on its DP replicas.

    Left out are the fillers (``megnorm_anchor``) that give every pipeline stage the same optimizer groups.
    """
    parameters = [p for p in engine.module.parameters() if not getattr(p, "megnorm_anchor", False)]
    for parameter in parameters:
        assert parameter.requires_grad, f"{sharding_of(parameter).name}: a frozen parameter has no master"
    return parameters


def is_second_copy(parameter: nn.Parameter) -> bool:
    """Whether another pipeline stage owns this tied weight."""
    return getattr(parameter, "ds_pipe_replicated", False)


def other_states(engine, groups: Groups) -> list[tuple[Sharding, Tensor]]:
    """Training state beside the parameters: buffers (``keep_state``), to read and write in place."""
    return [(Sharding(name, tuple(value.shape), role="state", init=Constant(0.0), first=groups.at.tp == 0), value)
            for name, value in kept_states(engine.module).items()]


def moment_keys(engine) -> tuple[str, ...]:
    """Names of the tensors that the base optimizer keeps for a parameter."""
    base = engine.basic_optimizer
    if isinstance(base, (torch.optim.AdamW, torch.optim.Adam)):
        assert not any(group["amsgrad"] for group in base.param_groups)
        return ("exp_avg", "exp_avg_sq")
    assert isinstance(base, torch.optim.SGD), f"no rule for the state of {type(base).__name__}"
    return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()


def optimizer_step(engine) -> int:
    """Updates that the optimizer has made: Adam's own count; SGD keeps none, there it is the engine's."""
    if not isinstance(engine.basic_optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        return engine.global_steps
    states = [engine.basic_optimizer.state.get(flat, {}) for flat in _flats(engine)]
    counts = {int(state["step"]) for state in states if "step" in state}
    assert len(counts) <= 1, f"the optimizer's groups disagree on the step: {sorted(counts)}"
    return counts.pop() if counts else 0


@torch.no_grad()
def read_state(engine) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    """Yield each parameter that this rank owns with its fp32 master and moments, whole over data parallelism.

    Values have this tensor-parallel rank's shape, and are valid until the next is taken. A collective call of
    the data-parallel replicas, one parameter at a time: each of them must take every item. A tied weight
    appears on one pipeline stage only. Moments that don't exist yet, before the first step, are zero.
    """
    accumulation = engine.gradient_accumulation_steps()
    assert engine.micro_steps % accumulation == 0, "state is read between steps, not within an accumulation"
    for parameter in local_parameters(engine):
        if is_second_copy(parameter):
            continue
        fragment = _fragment(engine, parameter)
        yield parameter, {key: _whole(parameter, fragment, _tensor(engine, fragment, key))
                          for key in (MASTER, *moment_keys(engine))}


@torch.no_grad()
def write_state(engine, lookup: Callable[[nn.Parameter, str], Tensor], step: int) -> None:
    """Give every local parameter the values ``lookup(parameter, key)``, of its local shape, fp32.

    Masters, moments, the step count and the low-precision copies: the next step is the one that an engine
    which had computed these values itself would take. A collective call of the data-parallel replicas, once
    all lookups are done. Fillers keep their value, with moments zero.
    """
    _create_state(engine, step)
    for parameter in local_parameters(engine):
        fragment = _fragment(engine, parameter)
        for key in (MASTER, *moment_keys(engine)):
            value = lookup(parameter, key)
            assert value.dtype == torch.float32 and tuple(value.shape) == sharding_of(parameter).local_shape
            piece = value.flatten().narrow(0, fragment.start, fragment.numel)
            _tensor(engine, fragment, key).copy_(piece)
    engine.global_steps = step
    _refresh(engine.optimizer)


def _flats(engine) -> list[Tensor]:
    """The tensors for which the base optimizer keeps state."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return optimizer.fp32_partitioned_groups_flat  # the groups' own lists are empty between steps
    return [flat for group in engine.basic_optimizer.param_groups for flat in group["params"]]


def _fragment(engine, parameter: nn.Parameter) -> _Fragment:
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        number, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        group = optimizer._get_param_partition_group(parameter)
        # Every rank's part has the same size: past the end of the parameter it is padding, which
        # DeepSpeed's own safe_set_full_fp32_param trips over.
        start = min(size * dist.get_rank(group), parameter.ds_numel)
        flat = optimizer.fp32_partitioned_groups_flat[number]
        return _Fragment(flat, at, start, min(size, parameter.ds_numel - start), group)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        here = parameter._hp_mapping
        if here is None:
            return _Fragment(parameter.new_empty(0, dtype=torch.float32), 0, 0, 0, parameter._dp_group)
        flats = (optimizer.fp32_groups_flat_partition if isinstance(optimizer, BF16_Optimizer)
                 else optimizer.single_partition_of_fp32_groups)
        return _Fragment(flats[here.param_group_index], here.hp_fragment_address.start,
                         here.lp_fragment_address.start, here.lp_fragment_address.numel, parameter._dp_group)
    assert optimizer is engine.basic_optimizer, f"no rule for {type(optimizer).__name__}"
    return _Fragment(parameter, 0, 0, parameter.numel(), None)


def _tensor(engine, fragment: _Fragment, key: str) -> Tensor:
    """The fragment of the master or of a moment: a view to read and write; zeros for a moment not yet made.

    Taken from the optimizer's state itself: DeepSpeed's links to it (safe_get_full_optimizer_state) miss all
    parameter groups but the first after the first step (stage_1_and_2.py:2987).
    """
    if fragment.numel == 0:
        return fragment.flat.new_empty(0)
    if key == MASTER:
        tensor = fragment.flat.data
    else:
        tensor = engine.basic_optimizer.state.get(fragment.flat, {}).get(key)
        if tensor is None:
            return fragment.flat.new_zeros(fragment.numel)
    assert tensor.dtype == torch.float32, f"{key} is kept in {tensor.dtype}, not in fp32"
    return tensor.view(-1).narrow(0, fragment.at, fragment.numel)


def _whole(parameter: nn.Parameter, fragment: _Fragment, piece: Tensor) -> Tensor:
    """The fragments of all ranks put together, bit by bit."""
    shape = sharding_of(parameter).local_shape
    if fragment.group is None or dist.get_world_size(fragment.group) == 1:
        return piece.reshape(shape)
    whole = piece.new_zeros(math.prod(shape))
    whole.narrow(0, fragment.start, fragment.numel).copy_(piece)
    # Summed as integers: each element has one owner, and 0.0 + -0.0 would lose a sign.
    dist.all_reduce(whole.view(torch.int32), group=fragment.group)
    return whole.view(shape)


def _create_state(engine, step: int) -> None:
    """Make the optimizer's state exist, as its first step would, with zero moments and this step count."""
    base = engine.basic_optimizer
    counts = isinstance(base, (torch.optim.AdamW, torch.optim.Adam))
    on_device = base.defaults.get("fused") or base.defaults.get("capturable")
    for flat in _flats(engine):
        state = base.state[flat]
        for key in moment_keys(engine):
            if state.get(key) is None:
                state[key] = torch.zeros_like(flat, memory_format=torch.preserve_format)
            state[key].zero_()
        if counts:
            state["step"] = torch.tensor(float(step), dtype=torch.float32,
                                         device=flat.device if on_device else "cpu")


def _refresh(optimizer) -> None:
    """Bring what follows from the masters up to date: low-precision weights, gathered copies, links."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        persistent = optimizer.persistent_parameters  # small ones stay gathered: let go of the stale copies
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
