"""The launcher for tests, compiled once, and an installation of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import Builds, Installed, Probe, probing

from gpuhook.prefork import launcher_cache


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("builds"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: Builds) -> Installed:
    made = Installed(tmp_path, builds)
    monkeypatch.setattr(launcher_cache, "FOLDER", str(made.saved))
    return made


@pytest.fixture(scope="session")
def probe(builds: Builds) -> Iterator[Probe]:
    with probing(builds.probe) as found:
        yield found
