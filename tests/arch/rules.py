"""Readers of the source that the architecture tests share: all by `ast`, nothing is imported."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What each layer of megnorm may import of the others: only what stands before it in the flow
# config -> plan -> data, model -> engine -> loop -> checkpoint, observe.
MAY_IMPORT = {
    "config": set(),
    "norms": {"config"},
    "plan": {"config", "norms"},
    "parallel": {"config", "norms", "plan"},
    "model": {"config", "norms", "plan", "parallel"},
    "data": {"config", "norms", "plan"},
    "engine": {"config", "norms", "plan", "parallel"},
    "checkpoint": {"config", "norms", "plan", "parallel", "engine"},
    "observe": {"config", "norms", "plan", "parallel", "data"},
    "scaling": {"config", "norms", "plan", "observe"},
    "interop": {"config", "norms", "plan", "parallel", "model", "data", "checkpoint"},
}
WITHOUT_TORCH = ("config", "norms", "plan", "data")
HEAVY = {"torch", "deepspeed", "transformers"}
# Entry points: they may read the environment. The ranks of tests are started by megnorm.testing.
READ_ENVIRONMENT = ("cli", "launcher", "__main__", "testing")
# Here pickles go through a pipe between processes that it started itself, never to or from a file.
OWN_PIPES = ("megnorm.testing.ranks",)
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 400


def tracked_files() -> list[Path]:
    """Files under version control that exist; in a copy without git, all that no dot folder holds."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        names = [name for name in done.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")
    ]


def sources(*folders: str) -> list[Path]:
    """Python files that are tracked, under the given folders of the repository."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


def module_of(path: Path) -> str:
    """Dotted name: megnorm/plan/flops.py is megnorm.plan.flops; a package keeps its __init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(module: str) -> str:
    """Second part of the dotted name: the layer, or the module at the top of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, in functions too; relative names are resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
        ):
            yield (
                node.lineno,
                ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "?",
            )


def import_faults(module: str, source: str) -> list[str]:
    """Imports that go against the flow of the layers, or bring torch where it must not be."""
    layer, faults = layer_of(module), []
    for line, name in imports_of(module, source):
        other = layer_of(name) if name.split(".")[0] == "megnorm" else ""
        if layer in MAY_IMPORT and other not in ("", layer, "__version__") and other not in MAY_IMPORT[layer]:
            faults.append(f"{module}:{line} imports {name}: {layer} may import {sorted(MAY_IMPORT[layer])}")
        if layer in WITHOUT_TORCH and name.split(".")[0] in HEAVY - (
            {"transformers"} if layer == "data" else set()
        ):
            faults.append(f"{module}:{line} imports {name}: {layer} works without it")
    return faults


def environment_faults(module: str, source: str) -> list[str]:
    """Reads of environment variables anywhere but at the entry points."""
    if layer_of(module) in READ_ENVIRONMENT:
        return []
    faults = []
    tree = ast.parse(source)
    written = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name in ("os.environ", "os.getenv", "os.environb") and node not in written:
            faults.append(f"{module}:{node.lineno} reads the environment: only the entry points do")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if {alias.name for alias in node.names} & {"environ", "getenv", "environb"}:
                faults.append(
                    f"{module}:{node.lineno} imports the environment: only the entry points read it"
                )
    return faults


def code_faults(module: str, source: str) -> list[str]:
    """Hidden globals, and whatever could execute what a file holds."""
    faults, tree = [], ast.parse(source)
    safe_loaders = {"yaml.SafeLoader"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    }
    for node in ast.walk(tree):
        line = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Global):
            faults.append(f"{line} has a global statement")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("eval", "exec"):
            faults.append(f"{line} calls {name}")
        if name == "torch.load" and given.get("weights_only") != "True":
            faults.append(f"{line} calls torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            faults.append(f"{line} calls {name} with allow_pickle")
        if name == "yaml.load" and given.get("Loader") not in safe_loaders:
            faults.append(f"{line} calls yaml.load without a safe loader")
        if name == "torch.serialization.add_safe_globals":
            faults.append(f"{line} widens what torch.load may build")
    for line, name in imports_of(module, source):
        if module not in OWN_PIPES and name.split(".")[0] in (
            "pickle",
            "cloudpickle",
            "dill",
            "marshal",
            "shelve",
            "joblib",
        ):
            faults.append(f"{module}:{line} imports {name}: nothing read from disk may be executed")
    return faults


def size_faults(module: str, source: str) -> list[str]:
    """Functions and files over the budget, docstrings and comments included."""
    faults, lines = [], source.count("\n")
    if lines > MAX_FILE_LINES:
        faults.append(f"{module} has {lines} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(
                    f"{module}:{node.lineno} {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
                )
    return faults


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Names that reach themselves along the edges."""

    def reach(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in edges.get(waiting.pop(), set()) - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    return [name for name in sorted(edges) if name in reach(name)]
