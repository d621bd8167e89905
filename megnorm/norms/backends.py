"""Which programs can compute the norms (model.norm.backend) and whether this machine has them. No torch."""

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megnorm.config.base import ConfigError

WHERE = "model.norm.backend"


def check_backend(backend: str) -> None:
    """Raise ConfigError when the backend's program is missing, or is not what its name suggests."""
    if backend == "apex":
        _check_apex()
    if backend == "compile" and not (cpp_compiler() or importlib.util.find_spec("triton")):
        raise ConfigError(f"{WHERE}=compile needs a C++ compiler (or triton, on a GPU), and there is none in PATH; "
                          "install one, or take auto")


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on a CPU."""
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def _check_apex() -> None:
    """NVIDIA's apex has a folder ``normalization``; the package called apex on PyPI is another program."""
    source = "build it from https://github.com/NVIDIA/apex, or take another backend (auto)"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise ConfigError(f"{WHERE}=apex: NVIDIA's apex is not installed; {source}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "normalization").is_dir() for folder in folders):
        try:
            found = f"apex {version('apex')}"
        except PackageNotFoundError:
            found = "apex"
        place = folders[0] if folders else spec.origin
        raise ConfigError(f"{WHERE}=apex: the installed {found} ({place}) is not NVIDIA's, but the package of that "
                          f"name on PyPI, another program: pip uninstall apex, then {source}")
