"""Computed orders on disk: the same arrays for all, whoever comes first, whatever is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megnorm.data.errors import DataError
from megnorm.data.index_cache import IndexCache, array_digest
from megnorm.data.megatron_order import MegatronMap
from megnorm.data.samples import SampleMap

ROOT = Path(__file__).parents[2]
LENGTHS = np.random.default_rng(0).integers(1, 50, 2000).astype(np.int32)


def sample_map(folder: Path | None, lengths: np.ndarray = LENGTHS, seed: int = 1) -> SampleMap:
    cache = IndexCache(folder)
    return SampleMap(lengths, np.arange(len(lengths) + 1), (0, len(lengths)), 16, seed, "t", cache=cache)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_cached_is_computed(tmp_path: Path) -> None:
    computed = sample_map(None)
    plain = [computed.segments(n) for n in range(0, 9000, 7)]
    for _ in range(2):
        cached = sample_map(tmp_path)
        assert [cached.segments(n) for n in range(0, 9000, 7)] == plain
    names = files(tmp_path)
    assert all(name.endswith(".npy") for name in names) and len(names) >= 6


def test_only_the_first_computes(tmp_path: Path) -> None:
    calls = []
    for _ in range(3):
        IndexCache(tmp_path).get({"k": 1}, lambda: calls.append(1) or np.arange(5))
    assert calls == [1]
    IndexCache(tmp_path).get({"k": 2}, lambda: calls.append(2) or np.arange(5))
    assert calls == [1, 2]


def test_other_content_under_the_same_path_is_another_key(tmp_path: Path) -> None:
    sample_map(tmp_path).segments(0)
    other = LENGTHS[::-1].copy()
    assert sample_map(tmp_path, other).segments(5) == sample_map(None, other).segments(5)
    assert array_digest(LENGTHS) != array_digest(other) != array_digest(other.astype(np.int64))


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        blocked = tmp_path / "file"
        blocked.write_text("")  # for root no folder is read-only; below a file nothing can be made
        assert IndexCache(blocked / "x").get({}, lambda: np.arange(3)).tolist() == [0, 1, 2]
        return
    filled, plain = sample_map(tmp_path).segments(3), files(tmp_path)
    tmp_path.chmod(0o555)
    try:
        assert sample_map(tmp_path).segments(3) == filled
        assert sample_map(tmp_path, seed=2).segments(3) == sample_map(None, seed=2).segments(3)
        assert files(tmp_path) == plain
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"garbage" * 100])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    right = sample_map(tmp_path).segments(11)
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(damage)
    assert sample_map(tmp_path).segments(11) == right
    assert all(path.read_bytes() != damage for path in tmp_path.glob("*.npy"))


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    IndexCache(tmp_path).get({}, lambda: np.arange(3))
    (path,) = tmp_path.glob("*.npy")
    np.save(path, np.array([{}], object), allow_pickle=True)
    assert IndexCache(tmp_path).get({}, lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_a_killed_builder_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    code = (
        "import os, numpy as np; from megnorm.data.index_cache import IndexCache, os as o;"
        "o.fsync = lambda f: os.kill(os.getpid(), 9);"
        f"IndexCache({str(tmp_path)!r}).get({{}}, lambda: np.arange(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -9 and not list(tmp_path.glob("[!.]*.npy"))
    assert IndexCache(tmp_path).get({}, lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_eight_at_once(tmp_path: Path) -> None:
    """All get the same; one computes, since they wait for each other."""
    code = (
        "import os, time, numpy as np; from pathlib import Path\n"
        "from megnorm.data.index_cache import IndexCache\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "def build():\n"
        "    (folder / f'built-{os.getpid()}').write_text('')\n"
        "    time.sleep(0.5)\n"
        "    return np.arange(100000)\n"
        "print(int(IndexCache(folder / 'c').get({}, build).sum()))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    assert {run.communicate(timeout=60)[0].strip() for run in runs} == {str(99999 * 50000)}
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_more_than_megatron_can_count_is_refused_before_anything_is_built() -> None:
    with pytest.raises(DataError, match=r"3,000,000,000 samples take [0-9,]+ epochs of 1,000 sequences"):
        MegatronMap(np.full(1000, 3, np.int32), (0, 1000), 8, 3 * 10**9)


def test_the_order_of_megatron_is_cached_too(tmp_path: Path) -> None:
    plain = MegatronMap(LENGTHS, (10, 1900), 16, 9000, 5)
    for _ in range(2):
        cached = MegatronMap(LENGTHS, (10, 1900), 16, 9000, 5, cache=IndexCache(tmp_path))
        assert [cached.segments(n) for n in range(0, 9000, 99)] == [
            plain.segments(n) for n in range(0, 9000, 99)
        ]
    other = MegatronMap(LENGTHS[::-1].copy(), (10, 1900), 16, 9000, 5, cache=IndexCache(tmp_path))
    assert other.segments(3) != plain.segments(3)
