"""Continue a text with a trained model: one process, no engine."""

from pathlib import Path

import torch
from torch import Tensor

from megnorm.checkpoint.resume import CheckpointError, choose
from megnorm.checkpoint.storage import read_manifest
from megnorm.checkpoint.weights import fill
from megnorm.config import load_config
from megnorm.data.datasets import tokenizer_meta
from megnorm.data.tokenizers import Tokenizer, load_tokenizer
from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
from megnorm.model.scale import StepClock
from megnorm.norms import placement_of
from megnorm.parallel.tensor import Alone


def continuation(run_dir: str | Path, prompt: str, tokens: int = 100, temperature: float = 0.8,
                 seed: int = 0) -> str:
    """``tokens`` tokens drawn after the prompt, as text, from the newest checkpoint of a run.

    Raises CheckpointError or DataError when the run has no checkpoint or no tokenizer.
    """
    config = load_config(Path(run_dir) / "config.yaml")
    chosen = choose(run_dir, "auto")
    if chosen.path is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to sample from")
    clock = StepClock(read_manifest(chosen.path).step)
    model = Decoder(decoder_layers(config.model, placement_of(config.model), "none", Alone(), clock=clock),
                    TokenLoss(config.model.vocab_size, Alone()))
    fill(model, chosen.path)
    tokenizer = _tokenizer(config)
    ids = tokenizer.encode([prompt])[0]
    if not ids:
        raise CheckpointError("the prompt holds no token")
    drawn = draw(model, torch.tensor(ids), tokens, temperature, seed, config.data.sequence_length,
                 config.model.vocab_size)
    return tokenizer.decode(ids + drawn)[len(tokenizer.decode(ids)):]


@torch.no_grad()
def draw(model: Decoder, ids: Tensor, tokens: int, temperature: float, seed: int, context: int,
         vocab: int) -> list[int]:
    """``tokens`` ids after ``ids`` [n], each seeing the last ``context`` ones; temperature 0: the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for _ in range(tokens):
        logits = model(ids[-context:].unsqueeze(0))[0, -1, :vocab].float()
        if temperature == 0:
            chosen = logits.argmax(keepdim=True)
        else:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        ids = torch.cat((ids, chosen))
        drawn.append(int(chosen))
    return drawn


def _tokenizer(config) -> Tokenizer:
    meta = tokenizer_meta(config)
    if meta is None:
        raise CheckpointError("the training data has no sidecar that names its tokenizer")
    prefix = (config.data.train or config.data.sources)[0][1]
    return load_tokenizer(meta.tokenizer.type, meta.tokenizer_path(prefix))
