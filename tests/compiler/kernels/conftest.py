"""Fixtures of the tests of kernels on a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages, whose name no other module has."""
    return tmp_path_factory.mktemp(request.module.__name__)


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that Torch allocates is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
