"""Text to tokens to batches: tokenizers, indexed files, sample maps, blends. Nothing here imports torch."""
