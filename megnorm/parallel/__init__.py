"""Tensor-parallel building blocks: groups as values, conjugate collectives, sharding as metadata."""
