"""The driver folder, which a child of the device plugin keeps up to date."""

import os
import signal
import time
from pathlib import Path

import pytest
from machines import VERSION, gpu, machine

from gpuhook.base.config.model import Config
from gpuhook.cluster.device_plugin import documents
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.monitor.machine import Found
from gpuhook.vendors.nvidia.vendor import VENDOR


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """A made-up inventory whose driver's files exist."""
    inventory = machine(gpu(0, 1))
    inventory.root = str(tmp_path / "root")
    for each in inventory.files:
        file = tmp_path / "root" / each.path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(each.path)
    return VENDOR, inventory


class ManagedSpecs:
    """The result of a call: its success, its messages, and the folder."""

    def __init__(self, place: Path, found: Found, failing: tuple[str, ...] = ()) -> None:
        said = place / "said"
        self.folder = place / "driver"
        settings = Settings(driver_folder=str(self.folder))

        def tell(sentence: str) -> None:  # called in the child process
            said.write_text(sentence)

        said.write_text("")
        self.well = documents.keep_driver_folder(
            documents.Chore(settings, Config(), [found], failing, tell)
        )
        self.said = said.read_text()


def test_a_new_driver_folder_is_reported_and_an_unchanged_folder_is_not(
    tmp_path: Path, found: Found
) -> None:
    first = ManagedSpecs(tmp_path, found)
    assert first.well
    assert VERSION in first.said
    assert (first.folder / "lib64/libcuda.so.1").exists()
    again = ManagedSpecs(tmp_path, found)
    assert again.well
    assert again.said == ""


def test_a_failing_drivers_folder_is_kept(tmp_path: Path, found: Found) -> None:
    ManagedSpecs(tmp_path, found)
    found[1].root = "/nowhere"
    kept = ManagedSpecs(tmp_path, found, ("nvidia",))
    assert kept.well
    assert (kept.folder / "lib64/libcuda.so.1").exists()


def test_a_file_in_place_of_the_driver_folder_is_an_error_and_unchanged(
    tmp_path: Path, found: Found
) -> None:
    (tmp_path / "driver").write_text("a user's")
    kept = ManagedSpecs(tmp_path, found)
    assert not kept.well
    assert "isn't a driver folder" in kept.said
    assert (tmp_path / "driver").read_text() == "a user's"


def test_the_driver_folder_worker_ends_with_the_supervisor(tmp_path: Path, found: Found) -> None:
    """Another supervisor may be started at once, so the worker must exit whatever it does."""
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:

        def tell(_: str) -> None:  # called in the child process
            os.write(writer, f"{os.getpid()}\n".encode())
            signal.pause()

        settings = Settings(driver_folder=str(tmp_path / "driver"))
        documents.keep_driver_folder(documents.Chore(settings, Config(), [found], (), tell))
        os._exit(0)
    os.close(writer)
    with open(reader) as words:
        int(words.readline())
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        began = time.monotonic()
        assert words.read() == ""  # returns when no process has the other end
    assert time.monotonic() - began < 60  # by itself, the worker exits after two minutes
