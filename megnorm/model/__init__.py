"""The transformer: norms, the sublayer equation, attention, FFN, blocks, decoder, initial values."""
