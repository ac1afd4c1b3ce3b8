"""Plans for containers on WSL2 and Tegra, for machines with simulated nodes."""

from typing import Any

import pytest
from machines import asked, granted, planned, read_request

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, UnknownDeviceError
from gpuhook.base.loader.layout import HostLayout, debian
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.core.plan.image import Image
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR

LIBRARIES = "/usr/lib/aarch64-linux-gnu/nvidia"
FILES = (
    DriverFile("library", f"{LIBRARIES}/libcuda.so.1.1", f"{LIBRARIES}/libcuda.so.1.1", "",
               "libcuda.so.1"),
    DriverFile("library", f"{LIBRARIES}/libnvidia-ml.so.1", f"{LIBRARIES}/libnvidia-ml.so.1", "",
               "libnvidia-ml.so.1"),
    DriverFile("link", "/usr/lib/libcuda.so", "aarch64-linux-gnu/nvidia/libcuda.so.1.1"),
    DriverFile("config", "/opt/more", "/opt/more", "csv-mounts"),
)  # fmt: skip


def machine(platform: str, count: int = 1) -> NvidiaInventory:
    """Return the Orin machine of the shared case, with a link and a list of other files."""
    given = ("/dev/nvidia0",)
    nodes = (DeviceNode("/dev/nvidia0", 99, 0), DeviceNode("/dev/other", 99, 1))
    gpus = tuple(Gpu(index, 0, "", "", "X", "", "", False, (), (), given) for index in range(count))
    return NvidiaInventory("/", "", "", gpus, nodes, FILES, platform=platform)


def paths(platform: str, *selectors: str, image: Image | None = None, **options: Any) -> list[str]:
    request = asked(*selectors, **options)
    plan = planned(request, machine(platform), image)
    return [op.describe() for op in plan.operations]


@pytest.mark.vectors("modifier", "modifier.csv")
def test_files_of_nvidias_tegra_lists_are_injected(case: dict[str, Any]) -> None:
    """The test compares everything except permissions, which are rw in gpuhook."""
    expected = case["expected"]
    env = [f"{name}={value}" for name, value in case["input"]["env"].items()]
    request = read_request({"process": {"env": env}}, Config())
    if "mounts" not in expected:
        assert request.devices is None
        return
    plan = planned(request, machine("tegra"), Image(HostLayout()))
    found = [op.to_json() for op in plan.operations]
    mounts = [each for each in found if each["kind"] == "bind"]
    assert {each["destination"] for each in mounts} == {each["path"] for each in expected["mounts"]}
    assert all(each["options"] == ["ro", "nosuid", "nodev"] for each in mounts)
    nodes = [each for each in found if each["kind"] == "device"]
    assert [(each["destination"], each["major"]) for each in nodes] == [
        (each["path"], each["major"]) for each in expected["devices"]
    ]
    [wanted] = [words[-1] for words in expected["createContainer"] if "create-symlinks" in words]
    links = {f"{each['target']}::{each['destination']}" for each in found if "target" in each}
    assert wanted in links


def test_a_request_for_none_on_tegra_gets_files_and_no_nodes() -> None:
    assert not [each for each in paths("tegra") if "device" in each]
    assert any("libcuda.so.1.1" in each for each in paths("tegra"))


def test_files_of_other_tegra_lists_are_given_only_on_request() -> None:
    ordinary, every = paths("tegra", "all"), paths("tegra", "all", features=("csv-mounts",))
    assert not [each for each in ordinary if "/opt/more" in each or "/dev/other" in each]
    assert any("/opt/more" in each for each in every)
    assert any("/dev/other" in each for each in every)


def test_tegra_links_are_made_in_the_loaders_folder() -> None:
    found = paths("tegra", "0", image=Image(debian("aarch64")))
    assert f"link /usr/lib/aarch64-linux-gnu/libcuda.so.1 to {LIBRARIES}/libcuda.so.1.1" in found
    assert "link /usr/lib/libcuda.so to aarch64-linux-gnu/nvidia/libcuda.so.1.1" in found


@pytest.mark.parametrize("platform", ["wsl", "tegra"])
@pytest.mark.parametrize(
    ("options", "kind"),
    [({"mig_config": "all"}, RequestError), ({"imex_channels": (0,)}, UnknownDeviceError)],
)
def test_mig_management_and_imex_are_refused_on_wsl_and_tegra(
    platform: str, options: dict[str, Any], kind: type[RequestError]
) -> None:
    grant = granted(asked("all", **options), machine(platform))
    with pytest.raises(kind):
        VENDOR.check(grant)


@pytest.mark.parametrize("word", ["1", "GPU-1", "00:00.0"])
def test_unknown_gpu_names_on_tegra_are_refused(word: str) -> None:
    with pytest.raises(UnknownDeviceError, match="it has 0"):
        granted(asked(word), machine("tegra"))


def test_one_gpu_of_several_on_wsl_causes_a_warning() -> None:
    several = machine("wsl", 2)
    assert "one node for all" in VENDOR.warnings(granted(asked("0"), several))[0]
    assert VENDOR.warnings(granted(asked("all"), several)) == []
    assert VENDOR.warnings(granted(asked(), several)) == []
