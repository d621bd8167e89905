"""What a norm scheme is: a rule that fills the slots of every layer and of the model."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megnorm.config.base import Section
from megnorm.config.model import InitPolicy
from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm


class NoOptions(Section):
    """Of a scheme without options."""


class Place(NamedTuple):
    """Where a block stands and the norms that it may use.

    n: over the hidden width, or the FFN's inner one; h: over one head; l: number of the block, 1..L, global;
    L: depth; d: hidden width, which only factors of the embedding depend on.
    """

    n: Norm
    h: HeadNorm
    l: int  # noqa: E741 -- the papers' letter
    L: int
    d: int | None

    @property
    def a(self) -> HeadNorm:
        """The norm over all heads together."""
        return self.h.model_copy(update={"scope": "all_heads"})

    @property
    def sqrt_d(self) -> float:
        """Square root of the hidden width."""
        assert self.d is not None, (
            "this scheme scales the embedding by sqrt(d): give resolve() the hidden width"
        )
        return math.sqrt(self.d)


def final_norm(at: Place) -> dict[str, Any]:
    """The model-level slots of most schemes."""
    return {"final_norm": at.n}


def no_final_norm(at: Place) -> dict[str, Any]:
    """Where the last block ends with a norm."""
    return {}


class Spec(NamedTuple):
    """A scheme whose options are known.

    block: slots of a block. ends: slots of the model, as fields of Placement. norm, head: what the scheme
    prescribes of its norms, as fields of Norm and HeadNorm. init: how matrices start.
    """

    block: Callable[[Place], Block]
    ends: Callable[[Place], dict[str, Any]] = final_norm
    norm: dict[str, Any] = {}
    head: dict[str, Any] = {}
    init: InitPolicy = "megatron"


class Scheme(NamedTuple):
    """A named scheme: one line on it, its source, its spec by options, what a user must know to run it."""

    summary: str
    paper: str
    spec: Callable[[Any], Spec]
    options: type[Section] = NoOptions
    needs: str = ""
    aliases: tuple[str, ...] = ()


def fixed(block: Callable[[Place], Block], **rest: Any) -> Callable[[NoOptions], Spec]:
    """The spec of a scheme without options."""
    spec = Spec(block, **rest)
    return lambda options: spec


def make_block(attention: dict[str, Any], ffn: dict[str, Any]) -> Block:
    """A block from the slots that are not empty."""
    return Block(attention=AttentionSlots(**attention), ffn=FFNSlots(**ffn))


def change_sublayers(block: Block, change: Callable[[AttentionSlots | FFNSlots], dict[str, Any]]) -> Block:
    """The block with the slots that ``change`` gives replaced in both sublayers."""
    return Block(
        attention=block.attention.model_copy(update=change(block.attention)),
        ffn=block.ffn.model_copy(update=change(block.ffn)),
    )
