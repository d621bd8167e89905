"""megnorm: distributed pretraining of transformers in which where the norms stand is data."""

__version__ = "0.1.0"
