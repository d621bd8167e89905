"""Data, layout, training, optimizer, schedule, checkpoints: everything but the model."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megnorm.config.base import Section

Rate = Annotated[float, Field(ge=0, lt=1)]
Source = tuple[Annotated[float, Field(gt=0)], str]


def _as_sources(value: Any) -> Any:
    """A single prefix is the list of one source with weight 1."""
    if isinstance(value, str):
        return ((1.0, value),)
    if isinstance(value, list):
        return tuple((float(w), p) if isinstance(w, int) else (w, p)
                     for w, p in (item if isinstance(item, (list, tuple)) and len(item) == 2 else (1.0, item)
                                  for item in value))
    return value


class BlendChange(Section):
    """From sample ``at_sample`` of the run on the training data is blended like this; each source goes on where
    it stopped."""

    at_sample: int = Field(gt=0)
    sources: tuple[Source, ...]

    @field_validator("sources", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        return _as_sources(value)


class DataConfig(Section):
    """Indexed datasets by prefix (PREFIX.bin, PREFIX.idx), alone or as [[weight, prefix], ...].

    Either ``train`` (and ``valid``, ``test``), or ``sources`` cut by document into ``split`` fractions.
    blend: the weights are shares of the tokens, or how many epochs the run takes of each source.
    max_epochs: no source may be repeated more often. order: of the training samples; ``megatron`` is
    Megatron's own, in which a longer run sees other samples from the start. packing: one stream of tokens cut
    into samples, or whole documents fitted into each (arXiv:2404.10830). mask_document_ends: no loss on the
    first token of a document that follows another one. mask_documents: tokens see earlier ones of their own
    document only. reset_positions: rotary positions count from the beginning of each document. cache: a folder
    where computed orders are kept.
    """

    sequence_length: int = Field(gt=0)
    train: tuple[Source, ...] | None = None
    valid: tuple[Source, ...] | None = None
    test: tuple[Source, ...] | None = None
    sources: tuple[Source, ...] | None = None
    split: tuple[float, float, float] | None = None
    tokenizer: str | None = None
    blend: Literal["tokens", "epochs"] = "tokens"
    max_epochs: float | None = Field(None, gt=0)
    changes: tuple[BlendChange, ...] = ()
    order: Literal["default", "megatron"] = "default"
    packing: Literal["none", "best_fit"] = "none"
    mask_document_ends: bool = False
    mask_documents: bool = False
    reset_positions: bool = False
    cache: str | None = None

    @field_validator("train", "valid", "test", "sources", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        return _as_sources(value)

    @field_validator("changes", mode="before")
    @classmethod
    def _changes(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("split", mode="before")
    @classmethod
    def _fractions(cls, value: Any) -> Any:
        return tuple(float(v) if isinstance(v, int) else v for v in value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_way(self) -> "DataConfig":
        if (self.train is None) == (self.sources is None):
            raise ValueError("name the data either as train (with valid, test) or as sources with split")
        if self.sources is not None and (self.split is None or self.valid or self.test):
            raise ValueError("sources goes with split: [train, valid, test] fractions, and not with valid or test")
        if self.split is not None and (self.sources is None or min(self.split) < 0 or sum(self.split) <= 0
                                       or self.split[0] <= 0):
            raise ValueError(f"split={list(self.split)} must be three fractions >= 0, the first above 0, "
                             "and goes with sources")
        return self

    @model_validator(mode="after")
    def _one_order(self) -> "DataConfig":
        if self.order == "megatron" and (self.packing != "none" or self.changes or self.blend != "tokens"):
            raise ValueError("order=megatron goes with packing=none, blend=tokens and no changes: Megatron has none")
        if self.packing != "none" and self.cache:
            raise ValueError(f"cache={self.cache} goes with packing=none: packed orders are computed anew")
        if self.blend == "epochs" and self.changes:
            raise ValueError("blend=epochs counts over the whole run, so it can't have changes")
        at = [change.at_sample for change in self.changes]
        if at != sorted(set(at)):
            raise ValueError(f"changes at samples {at}: must rise")
        return self


class ParallelConfig(Section):
    """The layout. dp follows from the world: world = tp * pp * cp * dp; given, it must agree.

    sp: cut the hidden stream along the sequence over the tensor-parallel ranks (arXiv:2205.05198).
    cp: cut whole sequences over ranks (arXiv:2309.14509). ep: cut the experts of model.moe over so many of the
    cp * dp ranks. stages: blocks of each pipeline stage, when the balanced cut is not wanted. recompute:
    activations that the backward pass computes again: those inside the attention core ("selective"), or all
    inside a block ("full").
    """

    tp: int = Field(1, gt=0)
    sp: bool = False
    pp: int = Field(1, gt=0)
    stages: tuple[int, ...] | None = None
    cp: int = Field(1, gt=0)
    ep: int = Field(1, gt=0)
    dp: int | None = Field(None, gt=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    recompute: Literal["none", "selective", "full"] = "none"
    timeout_seconds: int = Field(600, gt=0, le=7 * 24 * 3600)

    @field_validator("stages", mode="before")
    @classmethod
    def _counts(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class TrainConfig(Section):
    """How long, how much at once, in which precision. One of steps and tokens; batches count sequences.

    check_replicas_every: each so many steps (0: never) parameters that several ranks hold are compared, and the
    run stops when they differ.
    """

    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    micro_batch: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    dtype: Literal["fp32", "bf16"] = "fp32"
    clip: float = Field(1.0, ge=0)
    eval_every: int = Field(0, ge=0)
    eval_samples: int = Field(64, gt=0)
    check_replicas_every: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _one_duration(self) -> "TrainConfig":
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give the duration either as steps or as tokens")
        return self


class OptimizerConfig(Section):
    """AdamW. Weight decay covers matrices; norm gains, biases and embeddings are each a choice."""

    lr: float = Field(gt=0)
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    decay_norms: bool = False
    decay_biases: bool = False
    decay_embeddings: bool = False

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class ScheduleConfig(Section):
    """Learning rate over the run: linear warm-up, then the named curve down to min_lr at the end.

    ``wsd`` holds the peak and decays linearly over the last decay_steps or decay_tokens.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_tokens: int | None = Field(None, ge=0)
    min_lr: float = Field(0.0, ge=0)
    decay_steps: int | None = Field(None, gt=0)
    decay_tokens: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_unit(self) -> "ScheduleConfig":
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            raise ValueError("give the warm-up either as warmup_steps or as warmup_tokens")
        given = [n for n in ("decay_steps", "decay_tokens") if getattr(self, n) is not None]
        if (self.kind == "wsd") != (len(given) == 1):
            raise ValueError("kind=wsd takes one of decay_steps and decay_tokens, the other kinds none of them")
        return self


class CheckpointConfig(Section):
    """Save every n steps (0: only at the end); keep the last k, and for ever each with step % m == 0."""

    every: int = Field(0, ge=0)
    keep_last: int = Field(2, gt=0)
    keep_every: int = Field(0, ge=0)
    save_at_end: bool = True


class ObserveConfig(Section):
    """A console and metrics line each log_every steps. probe_every: in the first step and each so many (0: never)
    the line also holds each layer's gradient norm and the size of the residual stream by depth. routers_every: the
    same of what the routers of a mixture of experts do. idle_expert_steps: warn of an expert to which no token went
    for so many steps (0: never). peak_tflops: of one device, for MFU; None: from a table of devices, or measured on a
    CPU."""

    log_every: int = Field(1, gt=0)
    probe_every: int = Field(0, ge=0)
    routers_every: int = Field(10, ge=0)
    idle_expert_steps: int = Field(100, ge=0)
    tensorboard: bool = True
    peak_tflops: float | None = Field(None, gt=0)
