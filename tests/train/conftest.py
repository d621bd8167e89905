"""What several training tests share: data, and one run that nothing disturbed."""

from pathlib import Path

import pytest
import small_run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the datasets ``train`` and ``valid``."""
    folder = tmp_path_factory.mktemp("data")
    small_run.write_data(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of 20 steps on two processes in one go; ``output.txt`` beside it is what it printed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = small_run.write_config(folder / "config.yaml", small_run.raw_config(data, folder / "run"))
    command = small_run.run(config)
    assert command.code == 0, command.errors
    (folder / "output.txt").write_text(command.out)
    (folder / "errors.txt").write_text(command.errors)
    return folder / "run"
