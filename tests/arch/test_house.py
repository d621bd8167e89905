"""The repository as a whole: what lies at its top, what pip is told, what must not be in its files."""

import ast
import re
from pathlib import Path

from rules import ROOT, sources, tracked_files

TOP_LEVEL = {"megnorm", "launch", "configs", "tools", "tests", "setup.py", "README.md"}
# Folders of one person's or one service's machine; written so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w"
)


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in tracked_files():
        try:
            found.append((path.relative_to(ROOT), path.read_text()))
        except UnicodeDecodeError:  # pictures
            continue
    return found


def test_top_level_is_fixed() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_apex_never_reaches_pip() -> None:
    """The package of that name on PyPI is another program."""
    for name in ["setup.py", "launch/constraints.txt", "launch/install.sh"]:
        assert not re.search(r"\bapex\b", (ROOT / name).read_text(), re.I), name
    asked = re.compile("pip3? inst" + r"all[^\n]*\bapex\b", re.I)
    assert not [str(path) for path, text in texts() if asked.search(text)]


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert MACHINE_PATH.search("see /ho" + "me/somebody/x") and not MACHINE_PATH.search(
        "https://a.b/ho" + "me/x"
    )
    assert not [str(path) for path, text in texts() if MACHINE_PATH.search(text)]


def test_every_requirement_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "launch/constraints.txt").read_text().split("\n")
        if "==" in line
    }
    tree = ast.parse((ROOT / "setup.py").read_text())
    words = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List)]
    asked = {e.value for part in lists for e in part.elts if isinstance(e, ast.Constant)} - {"megnorm*"}
    names = {re.split(r"[<>=]", word)[0].lower() for word in asked if "megnorm" not in word}
    assert "torch" in names and "setuptools" in pinned and words
    assert names <= pinned, sorted(names - pinned)


def test_every_pin_is_exact() -> None:
    lines = (ROOT / "launch/constraints.txt").read_text().split("\n")
    wrong = [
        line
        for line in lines
        if line and not re.fullmatch(r'#.*|[\w.-]+==[\w.]+( ; python_version [<>=]+ "3\.\d+")?', line)
    ]
    assert not wrong


def test_only_one_file_pins() -> None:
    assert not [path for path, _ in texts() if path.name.startswith("requirements")]


def test_python_files_are_utf8_and_end_with_a_newline() -> None:
    assert not [
        path
        for path in sources("megnorm", "tools", "tests", "setup.py")
        if not path.read_text().endswith("\n") and path.read_text()
    ]
