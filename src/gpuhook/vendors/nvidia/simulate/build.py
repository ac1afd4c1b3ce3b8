"""Build a simulated driver root, or replace one."""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from gpuhook.errors import SimulateError
from gpuhook.simulate.place import MARKER, check_place, put_in_place
from gpuhook.simulate.tree import Tree
from gpuhook.vendors.nvidia.simulate import devices, driver, kernel_files
from gpuhook.vendors.nvidia.simulate.machine import Machine, SimulatedGpu, make_machine
from gpuhook.vendors.nvidia.simulate.options import Options
from gpuhook.vendors.nvidia.simulate.tables import generated_header, generated_source
from gpuhook.vendors.nvidia.simulate.vendor_files import (
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


def build(options: Options) -> Built:
    """Make the driver root ``options.root``, replacing a simulated one that is there.

    Everything is made beside it and put in place by one rename. Raises SimulateError if the
    options make no sense, if the folder holds something else, or if this user, file system
    or machine can't (no root, nodev mount, no compiler).
    """
    options.check()
    root = os.path.realpath(options.root)
    check_place(root)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    vendor = find_vendor_files(options.driver_files) if options.driver_files else None
    machine = make_machine(options, vendor.version if vendor else "")
    library_dir = vendor.library_dir if vendor else options.library_dir or default_library_dir()
    new = tempfile.mkdtemp(prefix=f".{os.path.basename(root)}.", dir=os.path.dirname(root))
    try:
        os.chmod(new, 0o755)  # noqa: S103 - a driver root is for everybody
        _fill(Tree(new), options, machine, library_dir, vendor)
        put_in_place(new, root)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Built(
        root=root,
        driver_version=machine.driver_version,
        cuda_version=f"{machine.cuda // 1000}.{machine.cuda % 1000 // 10}",
        library_dir=library_dir,
        gpus=machine.gpus,
    )


def default_library_dir() -> str:
    """Return the multiarch folder of this machine, where Debian and Ubuntu have libraries."""
    return f"/usr/lib/{os.uname().machine.replace('ppc64le', 'powerpc64le')}-linux-gnu"


def _fill(
    tree: Tree, options: Options, machine: Machine, library_dir: str, vendor: VendorFiles | None
) -> None:
    _make_skeleton(tree)
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
    driver.install_firmware(tree, machine.driver_version)
    if machine.loaded:
        majors = devices.used_majors(options, machine, devices.host_majors())
        devices.make_nodes(tree, options, machine, majors)
        kernel_files.make_proc(tree, machine, majors)
        kernel_files.make_sys(tree, machine, drm=options.drm)
        driver.install_sockets(tree)
    folders = public_library_dirs(tree, vendor) if vendor else [library_dir]
    if options.compat32:
        folders.append(driver.compat32_dir(library_dir))
    tree.text("etc/ld.so.conf", "".join(f"{folder}\n" for folder in folders))
    _make_ld_cache(tree.root)
    tree.text(MARKER, json.dumps({"driver_version": machine.driver_version}) + "\n")


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
        raise SimulateError("There is no ldconfig on this machine", "Install the C library's tools")
    done = subprocess.run([ldconfig, "-r", root], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulateError(
            f"ldconfig can't write the library cache ({done.stderr.strip()})",
            "Check that there is room on the file system",
        )
