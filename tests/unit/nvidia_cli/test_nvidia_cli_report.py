"""What nvidia-container-cli info and list print, of machines that are hard to come by."""

from gpuhook.start.inventory.model import DriverFile, Node
from gpuhook.tools.nvidia_cli.report import Wanted, info, listing
from gpuhook.vendors.nvidia.model import Gpu, Inventory, Mig, Selection

MIG = Mig(0, "MIG-1", 1, 0, "1g.10gb", 12, 13)
BUS = "00000000:1B:00.0"
GPU = Gpu(0, 3, "GPU-1", BUS, "NVIDIA H100", "9.0", "Nvidia", True, (MIG,))
NODES = (
    Node("/dev/nvidiactl", 195, 255),
    Node("/dev/nvidia3", 195, 3),
    Node("/dev/nvidia-caps/nvidia-cap12", 236, 12),
)
FIRMWARE = "/lib/firmware/nvidia/580.1/gsp_ga10x.bin"
FILES = (
    DriverFile("library", "/usr/lib/libcuda.so.1.2", "libcuda.so.1.2", "compute", "libcuda.so.1"),
    DriverFile("binary", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", "utility"),
    DriverFile("firmware", f"/usr{FIRMWARE}", FIRMWARE, ""),
)
MACHINE = Inventory(
    "/", "580.1", "13.0", (GPU,), NODES, FILES,
    mig_minors="config 1\nmonitor 2\ngpu3/gi1/access 12\ngpu3/gi1/ci0/access 13\n",
)  # fmt: skip


def test_info_of_a_machine_without_gpus() -> None:
    empty = Inventory("/", "580.1", "13.0", (), (), ())
    assert info(empty, csv=False) == "NVRM version:   580.1\nCUDA version:   13.0\n"


def test_info_spells_the_bus_in_lower_case() -> None:
    assert "Bus Location:   00000000:1b:00.0\n" in info(MACHINE, csv=False)
    assert info(MACHINE, csv=True).splitlines()[-1] == (
        "0,3,NVIDIA H100,Nvidia,GPU-1,00000000:1b:00.0,9.0"
    )


def test_a_mig_device_comes_with_its_access_files() -> None:
    selection = Selection((GPU,), ((GPU, MIG),), ("MIG-1",))
    instance = "/proc/driver/nvidia/capabilities/gpu3/mig/gi1"
    assert list(listing(MACHINE, Wanted(("binary", "library"), selection))) == [
        "/dev/nvidiactl",
        "/dev/nvidia3",
        f"{instance}/access",
        f"{instance}/ci0/access",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
        "/usr/bin/nvidia-smi",
        "/usr/lib/libcuda.so.1.2",
    ]


def test_management_of_mig() -> None:
    assert list(listing(MACHINE, Wanted((), None, mig=("config",)))) == [
        "/proc/driver/nvidia/capabilities/mig/config",
        "/dev/nvidia-caps/nvidia-cap1",
        "/proc/driver/nvidia/capabilities/gpu3",
        "/dev/nvidia-caps",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    ]


def test_imex_channels() -> None:
    assert list(listing(MACHINE, Wanted((), None, imex=(0, 7)))) == [
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-caps-imex-channels/channel7",
    ]


def test_firmware_is_listed_by_the_name_that_it_has_everywhere() -> None:
    assert list(listing(MACHINE, Wanted(("firmware",), None))) == [FIRMWARE]
