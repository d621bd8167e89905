"""Measures what rows of several documents cost: CPU-seconds of a forward and backward pass on one thread, masked
and with positions of their own, against the same rows as one document. Nothing is asserted."""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from megnorm.config import ModelConfig
from megnorm.model.decoder import Decoder, Inputs, TokenLoss, decoder_layers
from megnorm.model.documents import Documents
from megnorm.model.init import initialise
from megnorm.norms import placement_of
from megnorm.parallel.tensor import Alone

VOCAB = 1000
# sequence, rows, mean tokens of a document
SHAPES = ((256, 8, 64), (256, 8, 400), (1024, 2, 200), (2048, 1, 400))


def model() -> Decoder:
    """Two layers as wide as those of configs/own-text.yaml."""
    config = ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn_hidden=384, vocab_size=VOCAB, pad_vocab_to=8,
                         norm="hybrid_star")
    module = Decoder(decoder_layers(config, placement_of(config), "none", Alone()), TokenLoss(VOCAB, Alone()))
    initialise(module.parameters(), seed=1)
    return module


def documents(sequence: int, rows: int, mean: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and documents [rows, sequence], edges at random."""
    is_first = torch.rand(rows, sequence, generator=torch.Generator().manual_seed(0)) < 1 / mean
    ids, places = is_first.cumsum(1).int(), torch.arange(sequence).expand(rows, -1)
    return places - Documents(places, ids).begins, ids


def seconds(module: Decoder, inputs: Inputs, targets: torch.Tensor) -> float:
    """CPU-seconds of one pass."""
    weights, began = torch.full(targets.shape, 1 / targets.numel()), time.thread_time()
    module(inputs, targets, weights).backward()
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=8, help="passes of each kind, of which the quickest counts")
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    table = Table("tokens", "rows", "document", "plain ms", "documents ms", "ratio")
    module = model()
    for sequence, rows, mean in SHAPES:
        tokens = torch.randint(VOCAB, (rows, sequence), generator=torch.Generator().manual_seed(1))
        kinds = tokens, (tokens, *documents(sequence, rows, mean))
        passes = [[seconds(module, inputs, tokens) for inputs in kinds] for _ in range(repeat)]  # alternating
        plain, masked = (min(times) for times in zip(*passes, strict=True))
        table.add_row(str(sequence), str(rows), str(mean), f"{1e3 * plain:.1f}", f"{1e3 * masked:.1f}",
                      f"{masked / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
