"""Floating-point operations of training: one formula, shared by the plan, the printed MFU and the sweep."""

from dataclasses import dataclass

from megnorm.config import Config
from megnorm.plan.parameters import attention_matrices, ffn_parts, gate_matrices


@dataclass(frozen=True)
class Flops:
    """Operations per target token, forward and backward (a multiply-add counts 2, backward twice forward).

    matmul: 6 N, N the weights that a token is multiplied with: attention, FFN or router and the experts that it
        chooses, and the output matrix over the padded vocabulary, tied or not; not the embedding's lookup.
    attention: 12 L H e s, scores and context over the full square of the sequence, as arXiv:2204.02311
        (appendix B) counts them. ``attention_causal`` is the half that a causal mask leaves.
    total: matmul + attention. Recomputed activations are no useful work and never counted.
    formula, legend: the same with its numbers and what they stand for, for people.
    """

    matmul: int
    attention: int
    formula: str

    @property
    def total(self) -> int:
        """FLOPs of a training token, attention over the full square."""
        return self.matmul + self.attention

    @property
    def attention_causal(self) -> int:
        """FLOPs of attention that a causal kernel needs."""
        return self.attention // 2

    @property
    def legend(self) -> str:
        """What the formula's letters mean."""
        return (f"N: weights of matrices and output that a token meets; attention over the full square {self.attention:,}, "
                f"causal half {self.attention_causal:,}")


def flops_per_token(config: Config) -> Flops:
    """FLOPs of one training token; norms, softmax, activations and rotation are left out (below 1 %)."""
    model, s = config.model, config.data.sequence_length
    weights = model.layers * attention_matrices(model) + gate_matrices(model) + model.padded_vocab * model.hidden
    weights += sum(ffn_parts(model, layer).met for layer in range(model.layers))
    attention = 12 * model.layers * model.heads * model.head_size * s
    matmul = 6 * weights
    numbers = f"6 x {weights:,} + 12 x {model.layers} x {model.heads} x {model.head_size} x {s}"
    formula = f"6 N + 12 L H e s = {numbers} = {matmul + attention:,} FLOPs a token"
    return Flops(matmul=matmul, attention=attention, formula=formula)


def flops_per_step(config: Config) -> int:
    """FLOPs of one optimizer step: one global batch."""
    return flops_per_token(config).total * config.tokens_per_step


def model_flops_utilization(config: Config, tokens_per_second: float, devices: int,
                            peak_tflops: float) -> float:
    """MFU: the useful work of ``tokens_per_second`` (of the whole world) over what ``devices`` could do."""
    return flops_per_token(config).total * tokens_per_second / (devices * peak_tflops * 1e12)
