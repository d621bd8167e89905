"""Random orders that are the same on every machine, in every process and with every version of numpy."""

from __future__ import annotations

import hashlib
import json

import numpy as np

_BLOCK = 1 << 20
_BUCKET = 1 << 25  # keys that are sorted at once: 256 MiB


def derive_key(*parts: int | str) -> int:
    """A 128-bit key from integers and strings. Python's own hash() differs from process to process."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:16], "little")


def permutation(n: int, key: int) -> np.ndarray:
    """A random order of 0..n-1, u32 [n] (i64 from 2^32 on), a pure function of (n, key).

    Sorts random numbers whose low bits are replaced by the index: numpy promises that the raw stream of a bit
    generator never changes, but promises no such thing for Generator.shuffle. Long orders are sorted range by
    range of the numbers, so that not all of them are in memory at once.
    """
    out = np.empty(n, np.uint32 if n <= 1 << 32 else np.int64)
    bits = max(1, (n - 1).bit_length())
    buckets = max(0, (n - 1) // _BUCKET).bit_length()
    at = 0
    for bucket in range(1 << buckets):
        keys = _keys_of_bucket(n, key, bits, bucket, buckets)
        keys.sort()
        for a in range(0, len(keys), _BLOCK):
            block = keys[a : a + _BLOCK] & np.uint64((1 << bits) - 1)
            out[at + a : at + a + len(block)] = block
        at += len(keys)
    assert at == n
    return out


def _keys_of_bucket(n: int, key: int, bits: int, bucket: int, buckets: int) -> np.ndarray:
    """The keys whose first `buckets` bits are `bucket`, u64."""
    stream = np.random.Philox(key=key)
    share = n >> buckets
    keys = np.empty(min(n, share + share // 64 + 65536), np.uint64)  # a share's deviation is far below
    count = 0
    for a in range(0, n, _BLOCK):
        block = stream.random_raw(min(_BLOCK, n - a))
        block >>= np.uint64(bits)
        block <<= np.uint64(bits)
        block |= np.arange(a, a + len(block), dtype=np.uint64)
        if buckets:
            block = block[block >> np.uint64(64 - buckets) == bucket]
        keys[count : count + len(block)] = block
        count += len(block)
    return keys[:count]
