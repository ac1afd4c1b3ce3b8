"""Shared parts of the tests of NVIDIA's modules."""

from pathlib import Path

import pytest
from driver_tree import LibraryBuilder, Root


@pytest.fixture
def root(tmp_path: Path, library: LibraryBuilder) -> Root:
    """An empty driver root."""
    return Root(tmp_path, library)
