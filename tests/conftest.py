"""Fixtures for every tier."""

from collections.abc import Callable, Iterator

import pytest
from launching import Launched


@pytest.fixture
def launched() -> Iterator[Callable[[str], Launched]]:
    """Starts launchers from a JSON text of `launch`'s arguments; they are ended after the test."""
    started: list[Launched] = []

    def start(spec: str) -> Launched:
        started.append(Launched(spec))
        return started[-1]

    yield start
    for one in started:
        one.end()
