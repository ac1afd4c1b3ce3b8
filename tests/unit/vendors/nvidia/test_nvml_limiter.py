"""Limits set through NVML in a child process, with libraries that the tests compile."""

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pynvml
import pytest
from limiting_nvml import FOLDER, GIB, TAKES, limiter
from machines import gpu, machine
from timeouts import in_time

from gpuhook.base.config.model import Config
from gpuhook.base.errors import MemoryLimitError
from gpuhook.core import contract
from gpuhook.core.inventory.model import DriverFile
from gpuhook.core.request.reader import Request
from gpuhook.vendors.nvidia import nvml_limiter
from gpuhook.vendors.nvidia.nvml_limiter import NvmlLimiter
from gpuhook.vendors.nvidia.vendor import VENDOR

Make = Callable[..., NvmlLimiter]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that returns a limiter; its arguments choose the library's behaviour."""
    return partial(limiter, tmp_path)


def limit(nvml: NvmlLimiter) -> None:
    nvml.set("/sys/fs/cgroup", FOLDER, dict.fromkeys(nvml.memory, 8 * GIB))


def test_structures_match_nvidias_published_binding() -> None:
    """NVIDIA publishes this binding for release 615."""
    name = nvml_limiter._name(FOLDER)
    ours = bytes(nvml_limiter._struct(name, 3, 5, 7))
    path = ctypes.create_string_buffer(FOLDER.encode())
    both = (
        (pynvml.c_nvmlGetMemoryLimits_v1_t, (3, 5, 7)),
        (pynvml.c_nvmlSetMemoryLimits_v1_t, (3, 5)),
    )
    for structure, numbers in both:
        theirs = structure(ctypes.addressof(path), *numbers)
        assert bytes(theirs)[8:] == ours[8 : ctypes.sizeof(structure)]
    assert ctypes.string_at(int.from_bytes(ours[:8], "little")) == FOLDER.encode()
    assert pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX == nvml_limiter.UNLIMITED


def test_a_driver_root_without_a_cgroup_folder_is_refused(tmp_path: Path) -> None:
    """`gpuhook info` and every start with a limit check this before any change."""
    inventory = machine(gpu(0, 3).but(memory=80 * GIB)).but(
        version="615.1",
        root=str(tmp_path),
        files=(DriverFile("library", "/libnvidia-ml.so.1", "", "utility", nvml_limiter.LIBRARY),),
    )
    grant = contract.Grant(VENDOR, Request("nvidia"), inventory, inventory.devices)
    for there in ("", "sys", "sys/fs"):
        (tmp_path / there).mkdir(exist_ok=True)
        with pytest.raises(
            MemoryLimitError, match=f"The folder {tmp_path}/sys/fs/cgroup"
        ) as caught:
            VENDOR.memory_limiter(grant, Config())
        assert caught.value.remedy == f"Create it: mkdir -p {tmp_path}/sys/fs/cgroup"
    (tmp_path / "sys/fs/cgroup").mkdir()
    assert VENDOR.memory_limiter(grant, Config()).memory == {inventory.devices[0].id: 80 * GIB}


@pytest.mark.skipif(os.geteuid() != 0, reason="NVML lets root alone set limits")
def test_a_memory_limit_is_set_and_read_back(make: Make) -> None:
    nvml = make()
    nvml.begin()
    limit(nvml)
    [value] = make(get="it->hard = 1ULL << 32").used("/sys/fs/cgroup", [FOLDER])[FOLDER].values()
    assert value == (8 * GIB, 4 * GIB)
    [value] = make().used("/sys/fs/cgroup", [FOLDER])[FOLDER].values()
    assert value == (8 * GIB, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="NVML lets root alone set limits")
@pytest.mark.parametrize("number", [3, 6])
def test_a_cgroup_without_a_limit_has_no_usage(make: Make, number: int) -> None:
    assert make(get=f"return {number}").used("/sys/fs/cgroup", [FOLDER])[FOLDER] == {}


@pytest.mark.protects(
    "nvml-read-back",
    "a memory limit that NVIDIA's driver hasn't applied is an error",
    instead="if False:",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="NVML lets root alone set limits")
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ({"set_": ""}, r"returns \d+ bytes after 8589934592 were set"),
        ({"set_": "hard = it->hard + 1"}, "returns 8589934593 bytes after"),
        ({"set_": "return 3"}, r"returned 3 \(the driver doesn't account"),
        ({"set_": "return 4"}, r"returned 4 \(only root may"),
        ({"set_": "return 6"}, r"returned 6 \(the driver finds no such"),
        ({"set_": "return 12345"}, "returned 12345"),
        ({"get": "return 3"}, "nvmlDeviceGetMemoryLimits_v1 returned 3"),
        ({"init": "return 9"}, r"nvmlInit_v2 returned 9 \(the driver isn't loaded"),
        ({"init": "abort()"}, "exited without a response"),
        ({"set_": "_exit(0)"}, "exited without a response"),
        ({"set_": 'puts("x"); fflush(stdout); return 2'}, "returned 2"),
    ],
)
def test_unexpected_answers_of_the_library_are_errors(
    make: Make, does: dict[str, str], why: str
) -> None:
    with pytest.raises(MemoryLimitError, match=why):
        limit(make(**does))


def test_a_library_without_the_limit_function_is_an_error(make: Make) -> None:
    with pytest.raises(MemoryLimitError, match="nvmlDeviceSetMemoryLimits_v1"):
        limit(make(TAKES, "", "", "-DOLD"))


@pytest.mark.parametrize("where", ["init", "set_"])
def test_a_hanging_library_times_out_and_is_ended(make: Make, where: str) -> None:
    nvml = make(**{where: "sleep(3600)"}, wait=0.5)
    begun = time.monotonic()
    nvml.begin()
    assert nvml._child is not None
    child = nvml._child._pid
    with pytest.raises(MemoryLimitError, match="hasn't set the limits"):
        limit(nvml)
    assert time.monotonic() - begun < 600
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


@pytest.mark.skipif(os.geteuid() != 0, reason="NVML lets root alone set limits")
def test_nvml_is_initialized_before_the_limit_is_set(make: Make, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    nvml = make(init=f'fclose(fopen("{begun}", "r"))')
    nvml.begin()
    with in_time():
        begun.open("w").close()  # open() returns when NVML's initialization reads the fifo
    limit(nvml)


def test_cgroups_at_another_mount_point_are_refused(make: Make) -> None:
    nvml = make()
    with pytest.raises(MemoryLimitError, match="/sys/fs/cgroup, and here it is at /elsewhere"):
        nvml.set("/elsewhere", "/elsewhere/container", {})
    nvml.close()
