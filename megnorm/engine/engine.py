"""One optimizer step of the whole system, under DeepSpeed's plain or pipeline engine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from megnorm.config import Config
from megnorm.engine import clip, experts
from megnorm.engine.mpu import Mpu
from megnorm.engine.optimizer import parameter_groups
from megnorm.engine.settings import deepspeed_settings, zero_stage
from megnorm.engine.start import quiet
from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import sharding_of
from megnorm.parallel.tokens import sum_over_tokens

Inputs = Tensor | tuple[Tensor, Tensor, Tensor]
MicroBatch = tuple[Inputs, Tensor, Tensor]


class StepResult(NamedTuple):
    """Loss in nats per token, mean over the global batch; norm of the whole gradient before clipping; what was
    trained beside the loss, by name, on the same scale; what the router of each layer with experts did, by the layer's
    global number."""

    loss: float
    grad_norm: float
    beside: dict[str, float]
    routing: dict[int, Any]


class Engine:
    """A DeepSpeed engine around this rank's part of the model.

    Micro batches are (inputs, targets [b, s], weights [b, s]). Inputs are the tokens [b, s], or (tokens, positions
    [b, s], documents [b, s of whole rows]). The weights hold the normalisation, so that the engine's mean over
    micro batches and replicas is the mean over the tokens of the global batch.
    ``module.clock`` is the training step that the module sees, ``module.token_loss`` meters its loss,
    ``module.routing`` what its routers do.
    """

    def __init__(self, module: nn.Module, config: Config, groups: Groups,
                 make_optimizer: Callable[[list[dict]], torch.optim.Optimizer]):
        self.groups, self.clock, self.token_loss, self.routing = groups, module.clock, module.token_loss, module.routing
        self.accumulation = deepspeed_settings(config, groups.layout)["gradient_accumulation_steps"]
        self.routing.loss_scale = groups.layout.cp / self.accumulation
        for parameter in module.parameters():
            # DeepSpeed's gradient norm takes what carries this mark from every tensor rank, and all else from
            # the first one.
            parameter.tensor_model_parallel = sharding_of(parameter).first
        experts.announce(module, groups)
        optimizer = make_optimizer(parameter_groups(module, config.optimizer, groups))
        pipeline = groups.layout.pp > 1
        with quiet():
            self.raw, *_ = deepspeed.initialize(model=module, optimizer=optimizer,
                                                config=deepspeed_settings(config, groups.layout),
                                                mpu=None if pipeline else Mpu(groups))
        if zero_stage(config, groups.layout) == 0:
            clip.install(self.raw, groups)
        if isinstance(self.raw.optimizer, BF16_Optimizer):
            clip.sum_by_rows(self.raw.optimizer)
        if groups.layout.dp == 1:
            # A sum over one replica: DeepSpeed would copy all gradients there and back.
            self.raw.buffered_allreduce_fallback = lambda *args, **kwargs: None
        self._train, self._evaluate = ((self._train_pipeline, self._evaluate_pipeline) if pipeline
                                       else (self._train_plain, self._evaluate_plain))

    def step(self, batches: list[MicroBatch], lr: float, step: int) -> StepResult:
        """Training step number ``step``, from 1, at learning rate ``lr`` over this rank's ``accumulation`` micro
        batches. Evaluations that follow see the model as it is in this step."""
        assert len(batches) == self.accumulation, (len(batches), self.accumulation)
        for group in self.raw.basic_optimizer.param_groups:
            group["lr"] = lr
        self.clock.step = step
        self.token_loss.meter.take()
        loss = self._train(batches)
        routing = self.routing.end_step(lambda sums: sum_over_tokens(sums, self.groups),
                                        self.accumulation * self.groups.layout.replicas)
        beside = {**self._beside(len(batches)), **self.routing.beside(routing)}
        return StepResult(loss, float(self.raw.get_global_grad_norm()), beside, routing)

    def evaluate(self, batches: list[MicroBatch]) -> float:
        """Mean loss over the batches of all replicas, without gradients."""
        self.raw.eval()
        with torch.no_grad():
            loss = self._evaluate(batches)
        self.raw.train()
        return loss

    def _train_plain(self, batches: list[MicroBatch]) -> float:
        total = 0.0
        for batch in batches:
            loss = self.raw(*batch)
            self.raw.backward(loss)
            self.raw.step()
            total += loss.detach().double()
        return self._mean(total / len(batches))

    def _evaluate_plain(self, batches: list[MicroBatch]) -> float:
        return self._mean(sum(self.raw(*batch).double() for batch in batches) / len(batches))

    def _beside(self, micro_batches: int) -> dict[str, float]:
        """What the last stage metered, as means over micro batches and replicas, on every rank."""
        sums = self.token_loss.meter.take()
        means = {}
        for name in self.token_loss.parts:
            total = torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64, device=self.groups.device)
            dist.all_reduce(total, group=self.groups.pp_group)
            means[name] = self._mean(total / micro_batches)
        return means

    def _mean(self, loss: Tensor) -> float:
        loss = loss.clone()
        dist.all_reduce(loss, group=self.groups.dp_group)
        return float(loss) / self.groups.layout.dp

    def _train_pipeline(self, batches: list[MicroBatch]) -> float:
        return float(self.raw.train_batch(_as_pipeline(batches)))

    def _evaluate_pipeline(self, batches: list[MicroBatch]) -> float:
        loss = self.raw.eval_batch(_as_pipeline(batches), num_micro_batches=len(batches))
        return float(torch.as_tensor(loss).sum())


def _as_pipeline(batches: list[MicroBatch]):
    return iter([(inputs, (targets, weights)) for inputs, targets, weights in batches])
