"""Losses of counting models on the tokens that the network saw: what it must beat to have learned."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Baselines:
    """Cross entropies in nats per token on the validation targets, and what they were fitted on."""

    unigram: float
    bigram: float
    discount: float
    train_tokens: int
    valid_tokens: int


class Unigram:
    """p(w) = (c(w) + k) / (N + k V): counts of the targets, k of each token added so that none is 0."""

    def __init__(self, targets: np.ndarray, vocab: int, k: float = 1.0) -> None:
        counts = np.bincount(targets, minlength=vocab)
        self.probability = (counts + k) / (targets.size + k * vocab)


class Bigram:
    """Interpolated absolute discounting (Ney, Essen and Kneser 1994), u before w:

        p(w | u) = max(c(u, w) - D, 0) / c(u) + D n(u) / c(u) p(w)

    n(u): different tokens seen after u; p(w): the unigram; p(w | u) = p(w) where u was never seen. D is
    n1 / (n1 + 2 n2) from the pairs seen once and twice, unless it is given.
    """

    def __init__(self, before: np.ndarray, targets: np.ndarray, vocab: int,
                 discount: float | None = None) -> None:
        self.vocab, self.unigram = vocab, Unigram(targets, vocab)
        self.pairs, self.counts = np.unique(before.astype(np.int64) * vocab + targets, return_counts=True)
        once, twice = int((self.counts == 1).sum()), int((self.counts == 2).sum())
        self.discount = discount if discount is not None else (once / (once + 2 * twice) if twice else 0.75)
        self.seen = np.bincount(before, minlength=vocab)
        self.followers = np.bincount(self.pairs // vocab, minlength=vocab)

    def probability(self, before: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """p(targets[i] | before[i]), shape [n]."""
        wanted = before.astype(np.int64) * self.vocab + targets
        at = np.minimum(np.searchsorted(self.pairs, wanted), self.pairs.size - 1)
        count = np.where(self.pairs[at] == wanted, self.counts[at], 0)
        seen = np.maximum(self.seen[before], 1)
        held_back = np.where(self.seen[before] > 0, self.discount * self.followers[before] / seen, 1.0)
        return np.maximum(count - self.discount, 0) / seen + held_back * self.unigram.probability[targets]


def fit_baselines(train: np.ndarray, valid: np.ndarray, vocab: int,
                  discount: float | None = None) -> Baselines:
    """Fit on ``train`` [n, s + 1], evaluate on ``valid`` [m, s + 1]: token ids below ``vocab``.

    As the network does, each sample predicts its tokens 1..s, the bigram from the token before; nothing is
    carried from one sample to the next.
    """
    for name, tokens in (("training", train), ("validation", valid)):
        if tokens.ndim != 2 or not tokens.size:
            raise ValueError(f"the {name} tokens have shape {tokens.shape}: samples [n, s + 1] are needed")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise ValueError(f"the {name} tokens reach from {tokens.min()} to {tokens.max()}, beyond a "
                             f"vocabulary of {vocab}")
    model = Bigram(train[:, :-1].ravel(), train[:, 1:].ravel(), vocab, discount)
    before, targets = valid[:, :-1].ravel(), valid[:, 1:].ravel()
    return Baselines(
        unigram=float(-np.log(model.unigram.probability[targets]).mean()),
        bigram=float(-np.log(model.probability(before, targets)).mean()),
        discount=model.discount,
        train_tokens=train[:, 1:].size,
        valid_tokens=targets.size,
    )
