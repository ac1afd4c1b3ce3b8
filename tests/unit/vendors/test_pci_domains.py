"""PCI domains above 16 bits, which the kernel writes with as many digits as necessary."""

from pathlib import Path

import machines
import paper
import pci_domain
import pytest
from asking import labels, places, planned, resolved
from node_files import Machine
from samples import having
from steps import resolve

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.dra import slices as dra
from gpuhook.core.inventory.model import Inventory
from gpuhook.hpc.slurm.cores import Cores
from gpuhook.monitor.vendors import pci
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import Gpu

# PCI bus ids as NVML spells them -> as /sys, /proc and udev spell them.
SPELLINGS = {
    "0000:1B:00.0": "0000:1b:00.0",
    "00000000:1B:00.0": "0000:1b:00.0",
    "00000001:1B:00.0": "0001:1b:00.0",
    "0000FFFF:1B:00.0": "ffff:1b:00.0",
    "00010000:1B:00.0": "10000:1b:00.0",
    "0001000A:1B:00.0": "1000a:1b:00.0",
    "00100000:00:0A.1": "100000:00:0a.1",
    "03F8CFDD:00:00.0": "3f8cfdd:00:00.0",
    "FFFFFFFF:00:00.0": "ffffffff:00:00.0",
    "": "",
}
DOMAINS = pytest.mark.parametrize("domain", ["0000", "0a0b", "10000", "1000a", "3f8cfdd"])


def gpu(bus_id: str) -> Gpu:
    return Gpu(
        0, 3, "GPU-0", bus_id, "NVIDIA H200", "9.0", "Nvidia", mig_enabled=False, mig=(),
        drm=("/dev/dri/renderD128", "/dev/dri/card0"),
    )  # fmt: skip


@pytest.mark.parametrize(("nvmls", "kernels"), SPELLINGS.items())
def test_nvidia_bus_ids_are_written_as_by_the_kernel(nvmls: str, kernels: str) -> None:
    found = machines.machine(gpu(nvmls))
    assert gpu(nvmls).kernel_bus_id == kernels
    assert [device.bus_id for device in found.devices] == [kernels]


@pytest.mark.parametrize(("nvmls", "kernels"), [*SPELLINGS.items()][:-1])
def test_nvidia_gpus_in_large_domains_are_selected_and_masked(nvmls: str, kernels: str) -> None:
    found = machines.machine(gpu(nvmls))
    env = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
    plan = planned(found, *env)
    [mask] = [op.to_json() for op in plan.operations if op.kind == "proc-driver"]
    assert f"gpus/{kernels}" in mask["visible"]
    for word in (nvmls, kernels):  # NVML's spelling and the kernel's
        assert labels(resolved(found, f"NVIDIA_VISIBLE_DEVICES={word}")) == ["0"]


@DOMAINS
@pytest.mark.parametrize("vendor", having("on_pci"))
def test_devices_in_large_pci_domains_are_found_and_selected(
    vendor: str, domain: str, tmp_path: Path
) -> None:
    machine = Machine(vendor, tmp_path, 2)
    before = machine.look()
    pci_domain.move(tmp_path, domain)
    found = machine.look()
    assert [device.bus_id for device in found.devices] == [
        device.bus_id.replace("0000:", f"{domain}:", 1) for device in before.devices
    ]
    with Rootfs(str(tmp_path)) as root:
        for device in found.devices:
            assert pci.attribute(root, device.bus_id, "vendor").startswith("0x"), device.bus_id
            assert pci.complex_of(root, device.bus_id) == f"pci{domain}:00"
            place = dra._place(root, device.bus_id)
            assert place["resource.kubernetes.io/pciBusID"] == device.bus_id
            assert place["resource.kubernetes.io/pcieRoot"] == f"pci{domain}:00"
    names = registry.BUILT_IN[vendor]
    [variable] = [name for name, spaces in names.VARIABLES.items() if "bus_id" in spaces][:1]
    last = found.devices[-1]
    for word in (last.bus_id, last.bus_id.upper(), f"{int(domain, 16):08x}:{last.bus_id[-7:]}"):
        spec = paper.spec_with(f"{variable}={word}")
        answer = resolve(spec, Config(), inventories={vendor: found})
        assert answer is not None
        assert last.label in [device.label for device in answer.grants[0].devices]


@DOMAINS
def test_intel_by_path_links_have_the_large_domain(domain: str, tmp_path: Path) -> None:
    machine = Machine("intel_gpu", tmp_path, 1)
    pci_domain.move(tmp_path, domain)
    found: Inventory = machine.look()
    links = places(planned(found, "INTEL_VISIBLE_DEVICES=0"), "symlink")
    assert f"/dev/dri/by-path/pci-{found.devices[0].bus_id}-render" in links


@DOMAINS
def test_cores_near_a_gpu_in_a_large_domain_are_found(domain: str, tmp_path: Path) -> None:
    gpu_place = f"{domain}:1b:00.0"

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    write("devices/system/cpu/online", "0-3")
    write("devices/system/node/online", "0-1")
    for node, cpus in enumerate(("0-1", "2-3")):
        write(f"devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(4):
        write(f"devices/system/cpu/cpu{cpu}/topology/package_cpus_list", "0-3")
        write(f"devices/system/cpu/cpu{cpu}/topology/core_cpus_list", str(cpu))
    write(f"bus/pci/devices/{gpu_place}/local_cpulist", "2-3")
    assert Cores(str(tmp_path)).near(gpu_place) == "2-3"
