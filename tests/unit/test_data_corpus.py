"""The standard library as a corpus."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from megnorm.data.corpus import is_validation, write_stdlib_corpus
from megnorm.data.errors import DataError


def test_split_by_file_without_packages_and_foreign_encodings(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    for k in range(200):
        (root / f"p{k % 7}").mkdir(parents=True, exist_ok=True)
        (root / f"p{k % 7}" / f"m{k}.py").write_text(f"x = {k}\n")
    for folder in ("site-packages", "__pycache__"):
        (root / folder).mkdir()
        (root / folder / "no.py").write_text("no")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    report = write_stdlib_corpus(tmp_path / "out", 10, root)
    parts = {}
    for part in ("train", "valid"):
        lines = (tmp_path / "out" / f"{part}.jsonl").read_bytes().splitlines()
        parts[part] = {orjson.loads(line)["path"]: orjson.loads(line)["text"] for line in lines}
        assert report.files[part] == len(lines)
    assert report.undecodable == 1
    assert not parts["train"].keys() & parts["valid"].keys()
    assert len(parts["train"]) + len(parts["valid"]) == 200
    assert 5 < len(parts["valid"]) < 50
    assert all(is_validation(path, 10) for path in parts["valid"])
    assert parts["train"] | parts["valid"] == {f"p{k % 7}/m{k}.py": f"x = {k}\n" for k in range(200)}


def test_too_few_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few"):
        write_stdlib_corpus(tmp_path / "out", 10, tmp_path)
    with pytest.raises(DataError, match="--validation-every 1"):
        write_stdlib_corpus(tmp_path / "out", 1, tmp_path)
    assert list((tmp_path / "out").iterdir()) == []
