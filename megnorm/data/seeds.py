"""Random orders that are the same on every machine, in every process and with every version of numpy."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def derive_key(*parts: int | str) -> int:
    """A 128-bit key from integers and strings. Python's own hash() differs from process to process."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:16], "little")


def permutation(n: int, key: int) -> np.ndarray:
    """A random order of 0..n-1, u32 [n] (i64 from 2^32 on), a pure function of (n, key).

    Sorts random numbers whose low bits are replaced by the index: numpy promises that the raw stream of a bit
    generator never changes, but promises no such thing for Generator.shuffle.
    """
    bits = max(1, (n - 1).bit_length())
    keys = np.random.Philox(key=key).random_raw(n)
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << bits) - 1)
    return keys.astype(np.uint32 if n <= 1 << 32 else np.int64)
