"""The layers' import rules, hidden state, what may execute files, and the size budget."""

from pathlib import Path

import pytest
from rules import (
    ROOT,
    code_faults,
    cycles,
    environment_faults,
    import_faults,
    imports_of,
    layer_of,
    module_of,
    size_faults,
    sources,
)

FILES = sources("megnorm", "tools")


@pytest.mark.parametrize("check", [import_faults, environment_faults, code_faults, size_faults])
def test_the_code_keeps_the_rule(check) -> None:
    faults = [fault for path in FILES for fault in check(module_of(path), path.read_text())]
    assert not faults, "\n".join(faults)


def test_no_layer_reaches_itself() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        layer = layer_of(module_of(path))
        named = imports_of(module_of(path), path.read_text())
        others = {layer_of(name) for _, name in named if name.startswith("megnorm.")}
        if path.is_relative_to(ROOT / "megnorm"):
            edges.setdefault(layer, set()).update(others - {layer, "__version__"})
    assert not cycles(edges), {name: sorted(edges[name]) for name in cycles(edges)}


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20 and Path(ROOT / "megnorm" / "launcher.py") in FILES


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("megnorm.config.base", "import torch", "works without it"),
        ("megnorm.norms.resolve", "def f():\n    import torch.nn", "works without it"),
        ("megnorm.plan.flops", "from torch import nn", "works without it"),
        ("megnorm.data.readers", "def f():\n    from torch import nn", "works without it"),
        ("megnorm.engine.engine", "from megnorm.model import block", "engine may import"),
        ("megnorm.engine.engine", "from megnorm import model", "engine may import"),
        ("megnorm.engine.engine", "def f():\n    from ..model.block import Block", "engine may import"),
        ("megnorm.engine.__init__", "from .. import model", "engine may import"),
        ("megnorm.checkpoint.load", "import megnorm.model.decoder", "checkpoint may import"),
        ("megnorm.config.base", "from megnorm.loop import train", "config may import"),
        (
            "megnorm.model.block",
            "import importlib\nimportlib.import_module('megnorm.engine')",
            "model may import",
        ),
    ],
)
def test_a_planted_import_is_found(module: str, line: str, said: str) -> None:
    assert any(said in fault for fault in import_faults(module, line))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megnorm.data.readers", "import transformers"),
        ("megnorm.engine.engine", "from . import clip\nfrom .clip import f\nfrom ..plan import layout"),
        ("megnorm.cli", "from megnorm import engine\nimport torch"),
    ],
)
def test_a_right_import_is_let_pass(module: str, line: str) -> None:
    assert not import_faults(module, line)


@pytest.mark.parametrize(
    "line",
    [
        "import os\nx = os.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
        "os.environ.get('A')",
    ],
)
def test_a_planted_read_of_the_environment_is_found(line: str) -> None:
    assert environment_faults("megnorm.engine.engine", line)
    assert not environment_faults("megnorm.launcher", line)
    assert not environment_faults("megnorm.engine.engine", "os.environ['A'] = '1'")


@pytest.mark.parametrize(
    "line",
    [
        "def f():\n    global x\n    x = 1",
        "eval('1')",
        "exec('1')",
        "import pickle",
        "def f():\n    from pickle import load",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "np.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "class Loose(yaml.Loader):\n    pass\nyaml.load(t, Loader=Loose)",
    ],
)
def test_planted_code_is_found(line: str) -> None:
    assert code_faults("megnorm.engine.engine", line)


def test_safe_code_is_let_pass() -> None:
    safe = (
        "model.eval()\ntorch.load('x', weights_only=True)\nnp.load('x')\nyaml.load(t, Loader=yaml.SafeLoader)"
    )
    derived = "class Strict(yaml.SafeLoader):\n    pass\nyaml.load(t, Loader=Strict)"
    assert not code_faults("megnorm.engine.engine", safe) and not code_faults(
        "megnorm.config.config", derived
    )


def test_planted_sizes_are_found() -> None:
    assert size_faults("m", "def f():\n" + "    x = 1\n" * 70)
    assert not size_faults("m", "def f():\n" + "    x = 1\n" * 69)
    assert size_faults("m", "x = 1\n" * 401) and not size_faults("m", "x = 1\n" * 400)


def test_planted_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert not cycles({"a": {"b"}, "b": {"c"}})
