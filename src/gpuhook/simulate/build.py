"""Build, replace and remove a simulated driver root."""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from gpuhook.errors import SimulateError
from gpuhook.simulate import devices, driver, kernel_files
from gpuhook.simulate.machine import Machine, SimulatedGpu, make_machine
from gpuhook.simulate.options import Options
from gpuhook.simulate.tables import MARKER, generated_header, generated_source
from gpuhook.simulate.tree import Tree
from gpuhook.simulate.vendor_files import (
    VendorFiles,
    find_vendor_files,
    install_vendor_files,
    public_library_dir,
)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
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
    root = os.path.abspath(options.root)
    _check_place(root)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    vendor = find_vendor_files(options.driver_files) if options.driver_files else None
    machine = make_machine(options, vendor.version if vendor else "")
    if vendor:
        library_dir = vendor.library_dir
    else:
        library_dir = options.library_dir or f"/usr/lib/{os.uname().machine}-linux-gnu"
    new = tempfile.mkdtemp(prefix=f".{os.path.basename(root)}.", dir=os.path.dirname(root))
    try:
        os.chmod(new, 0o755)  # noqa: S103 - a driver root is for everybody
        _fill(Tree(new), options, machine, library_dir, vendor)
        _put_in_place(new, root)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Built(
        root=root,
        driver_version=machine.driver_version,
        cuda_version=f"{machine.cuda // 1000}.{machine.cuda % 1000 // 10}",
        library_dir=library_dir,
        gpus=machine.gpus,
    )


def remove(root: str) -> None:
    """Delete a simulated driver root; SimulateError if the folder isn't one."""
    root = os.path.abspath(root)
    if not os.path.isfile(os.path.join(root, MARKER)):
        raise SimulateError(
            f"{root} is not a simulated driver root", "Name the folder that simulate built"
        )
    _check_no_mounts(root)
    try:
        shutil.rmtree(root)
    except OSError as error:
        raise SimulateError(
            f"{root} can't be removed ({error})", "Unmount what is mounted below it and try again"
        ) from error


def _check_no_mounts(root: str) -> None:
    """Refuse to delete a tree with mounts in it, which could reach the machine's own /dev."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split()[4].encode().decode("unicode_escape") for line in file]
    inside = [point for point in points if point.startswith(f"{root}/")]
    if inside:
        raise SimulateError(f"Something is mounted on {inside[0]}", "Unmount it and try again")


def _check_place(root: str) -> None:
    if os.geteuid() != 0:
        raise SimulateError("Only root can make device nodes", "Run the command as root")
    _check_no_mounts(root)
    existing = root
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if os.path.isdir(root):
        if os.listdir(root) and not os.path.isfile(os.path.join(root, MARKER)):
            raise SimulateError(
                f"{root} is not empty and no simulated driver root",
                "Choose a folder that doesn't exist yet",
            )
    elif os.path.lexists(root) or not os.path.isdir(existing):
        raise SimulateError(f"{existing} is not a folder", "Choose a folder for the driver root")
    if os.statvfs(existing).f_flag & os.ST_NODEV:
        raise SimulateError(
            f"{existing} is on a file system mounted with nodev, where device nodes don't work",
            "Choose a folder on another file system",
        )


def _fill(
    tree: Tree, options: Options, machine: Machine, library_dir: str, vendor: VendorFiles | None
) -> None:
    _make_skeleton(tree)
    if vendor:
        install_vendor_files(tree, vendor)
    with tempfile.TemporaryDirectory(dir=tree.root) as compiled:
        Tree(compiled).text("generated.h", generated_header(machine, options.failure, library_dir))
        Tree(compiled).text("generated.c", generated_source(machine))
        driver.compile_driver(compiled)
        driver.install_main_libraries(tree, compiled, machine.driver_version, library_dir)
        if vendor is None:
            driver.install_stock(tree, compiled, machine.driver_version, library_dir)
        driver.install_probes(tree, compiled)
    driver.install_firmware(tree, machine.driver_version)
    if machine.loaded:
        majors = devices.host_majors()
        devices.make_nodes(tree, machine, majors, drm=options.drm)
        kernel_files.make_proc(tree, machine, majors)
        kernel_files.make_sys(tree, machine, drm=options.drm)
        driver.install_sockets(tree)
    public = public_library_dir(vendor) if vendor else library_dir
    tree.text("etc/ld.so.conf", f"{public}\n")
    _make_ld_cache(tree.root)
    tree.text(MARKER, json.dumps({"driver_version": machine.driver_version}) + "\n")


def _make_skeleton(tree: Tree) -> None:
    for name in _MERGED:
        tree.folder(f"usr/{name}")
        tree.link(name, f"usr/{name}")
    for name in ("dev", "proc", "sys", "run", "etc", "var", "tmp"):
        tree.folder(name)
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


def _put_in_place(new: str, root: str) -> None:
    """Swap the new tree with the old one; ``new`` then holds what is to be thrown away."""
    if not os.path.isdir(root):
        os.rename(new, root)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    failed: int = libc.renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(root), _RENAME_EXCHANGE
    )
    if failed:
        error = ctypes.get_errno()
        raise SimulateError(
            f"{root} can't be replaced ({os.strerror(error)})",
            "Unmount what is mounted on or below it and try again",
        )
