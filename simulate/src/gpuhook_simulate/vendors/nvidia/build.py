"""Building and replacing of simulated NVIDIA driver roots."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from gpuhook.base.errors import SimulateError
from gpuhook.base.loader import layout
from gpuhook_simulate import majors
from gpuhook_simulate.build import build as build_root
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import devices, driver, kernel_files, platforms, state
from gpuhook_simulate.vendors.nvidia.machine import SimulatedGpu, SimulatedMachine, make_machine
from gpuhook_simulate.vendors.nvidia.options import Options
from gpuhook_simulate.vendors.nvidia.tables import generated_header, generated_source
from gpuhook_simulate.vendors.nvidia.vendor_files import (
    VendorFiles,
    find_vendor_files,
    install_vendor_files,
    public_library_dirs,
)

_MERGED = ("bin", "sbin", "lib", "lib64")


@dataclass(frozen=True, slots=True)
class Built:
    """A finished driver root."""

    root: str
    driver_version: str
    cuda_version: str
    library_dir: str
    gpus: tuple[SimulatedGpu, ...]
    platform: str = "linux"

    def to_json(self) -> dict[str, object]:
        """Return the output of ``gpuhook simulate --format json``."""
        return {
            "root": self.root,
            "driver_version": self.driver_version,
            "cuda_version": self.cuda_version,
            "library_dir": self.library_dir,
            "gpus": [{"index": index, **gpu.to_json()} for index, gpu in enumerate(self.gpus)],
        }

    def lines(self) -> list[str]:
        """Return a readable description."""
        lines = [f"{self.root}: driver {self.driver_version}, CUDA {self.cuda_version}"]
        for index, gpu in enumerate(self.gpus):
            node = platforms.NODES.get(self.platform, f"/dev/nvidia{gpu.minor}")
            node += " (lost)" if gpu.lost else ""
            lines.append(f"GPU {index}: {gpu.model.name} {gpu.uuid} {gpu.pci_bus_id} {node}")
            lines += [f"  MIG {mig.profile.name} {mig.uuid}" for mig in gpu.migs]
        return lines


def build(options: Options) -> Built:
    """Build the driver root ``options.root``, replacing an existing simulated one.

    Raises SimulateError for invalid options, if the folder contains something else, or if the
    user, file system or host doesn't permit it (no root, nodev mount, no compiler).
    """
    options.check()
    root = os.path.realpath(options.root)
    vendor = find_vendor_files(options.driver_files) if options.driver_files else None
    machine = make_machine(options, vendor.version if vendor else "")
    library_dir = vendor.library_dir if vendor else options.library_dir or default_library_dir()
    library_dir = platforms.LIBRARY_DIRS.get(options.platform, library_dir)
    build_root(options.root, lambda tree: _fill(tree, options, machine, library_dir, vendor))
    return Built(
        root=root,
        driver_version=machine.driver_version,
        cuda_version=f"{machine.cuda // 1000}.{machine.cuda % 1000 // 10}",
        library_dir=library_dir,
        gpus=machine.gpus,
        platform=options.platform,
    )


def default_library_dir() -> str:
    """Return the host's multiarch folder, which has the libraries of Debian and Ubuntu."""
    return f"/usr/lib/{layout.triplet(os.uname().machine)}"


def _fill(
    tree: Tree,
    options: Options,
    machine: SimulatedMachine,
    library_dir: str,
    vendor: VendorFiles | None,
) -> None:
    _make_skeleton(tree)
    if options.platform != "linux":
        platforms.fill(tree, options, machine, library_dir)
        _make_ld_cache(tree.root)
        return
    if vendor:
        install_vendor_files(tree, vendor)
    with tempfile.TemporaryDirectory(dir=tree.root) as compiled:
        Tree(compiled).text("generated.h", generated_header(machine, options.failure, library_dir))
        Tree(compiled).text("generated.c", generated_source(machine))
        driver.compile_driver(compiled, compat32=options.compat32)
        driver.install_main_libraries(tree, compiled, machine.driver_version, library_dir)
        if vendor is None:
            driver.install_stock(tree, compiled, machine.driver_version, library_dir)
        if options.compat32:
            driver.install_compat32(tree, compiled, machine.driver_version, library_dir)
        driver.install_probes(tree, compiled)
    state.make(tree, state.BuildState(options, machine.driver_version, library_dir), machine)
    driver.install_firmware(tree, machine.driver_version)
    if machine.loaded:
        _make_devices(tree, options, machine)
        kernel_files.make_proc(tree, machine)
        kernel_files.make_sys(tree, machine, drm=options.drm)
        driver.install_sockets(tree)
    folders = public_library_dirs(tree, vendor) if vendor else [library_dir]
    if options.compat32:
        folders.append(driver.compat32_dir(library_dir))
    tree.text("etc/ld.so.conf", "".join(f"{folder}\n" for folder in folders))
    _make_ld_cache(tree.root)


def _make_devices(tree: Tree, options: Options, machine: SimulatedMachine) -> None:
    """Create the nodes, and the /proc/devices with their majors."""
    known = majors.machines_devices()
    free = devices.used_majors(options, machine, majors.free_majors(devices.DRIVERS, known))
    devices.make_nodes(tree, options, machine, free)
    fixed = dict.fromkeys(("nvidia", "nvidia-modeset", "nvidiactl"), devices.NVIDIA_MAJOR)
    tree.text("proc/devices", majors.devices_text({**fixed, **free}, known), 0o444)


def _make_skeleton(tree: Tree) -> None:
    for name in _MERGED:
        tree.folder(f"usr/{name}")
        tree.link(name, f"usr/{name}")
    for name in ("dev", "proc", "sys", "run", "etc", "var"):
        tree.folder(name)
    tree.folder("tmp", 0o1777)
    tree.link("var/run", "/run")


def _make_ld_cache(root: str) -> None:
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not ldconfig:
        raise SimulateError("There is no ldconfig on this host", "Install the C library's tools")
    done = subprocess.run([ldconfig, "-r", root], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulateError(
            f"ldconfig can't write the library cache ({done.stderr.strip()})",
            "Check that there is room on the file system",
        )
