"""Generated files in a container for NVIDIA's driver.

The application profile: EGL enumerates every GPU of the host, and the setting
EGLVisibleDGPUDevices, a mask with bit N for /dev/nvidiaN, restricts it to existing ones.

/proc/driver/nvidia/params: the driver's user-space libraries create missing device nodes
themselves unless ModifyDeviceFiles is 0 there. A container may only have the nodes that it was
granted.
"""

import os
import stat

from gpuhook.base.container import kernel
from gpuhook.base.fileio import write_all
from gpuhook.core.plan.operations import Operation, attributes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.container.rootfs import Rootfs

PROC_DRIVER = "/proc/driver/nvidia"
PROC_OPTIONS = ("ro", "nosuid", "nodev", "noexec")
_MAX_PROC_FILE = 1 << 20

PROFILE_PATH = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
PROFILE_MODE = 0o444
_BITS = 64  # the mask's width: the driver reads no more
_MODIFIES = b"ModifyDeviceFiles: 1"
_KEEPS = b"ModifyDeviceFiles: 0"  # protects: modify-device-files


def profile(minors: "Iterable[int]") -> str | None:
    """Return the file's text for GPUs with these minor numbers, None if it would hide all.

    A minor beyond the mask is left out. The number is not quoted: the driver's format has
    hexadecimal numbers, which JSON doesn't have.
    """
    mask = 0
    for minor in minors:
        if 0 <= minor < _BITS:
            mask |= 1 << minor
    if not mask:
        return None
    return (
        f'{{"profiles":[{{"name":"_container_","settings":["EGLVisibleDGPUDevices",{mask:#x}]}}],'
        '"rules":[{"pattern":[],"profile":"_container_"}]}'
    )


def gpu_minors(nodes: "Iterable[tuple[str, bool, int]]") -> tuple[int, ...]:
    """Return the minors of GPU nodes among (name, is a character device, minor) tuples."""
    return tuple(minor for name, is_device, minor in nodes if is_device and _is_gpu(name))


def _is_gpu(name: str) -> bool:
    number = name.removeprefix("nvidia")
    return number != name and number.isascii() and number.isdecimal()


def masked_params(content: bytes) -> bytes | None:
    """Return the file with ModifyDeviceFiles at 0, None if it needs no change.

    Only a line with exactly this setting counts. All other lines stay, and the last one
    ends in a newline.
    """
    lines = content.removesuffix(b"\n").split(b"\n")
    if _MODIFIES not in lines:
        return None
    return b"".join((_KEEPS if line == _MODIFIES else line) + b"\n" for line in lines)


class MaskProc(Operation):
    """Mask of the container's /proc/driver/nvidia, if it has one; shows only permitted files.

    A read-only tmpfs with ``files`` copied (ModifyDeviceFiles switched off in params, so
    that no driver client in the container changes device nodes) and ``binds`` mounted,
    both relative to /proc/driver/nvidia.
    """

    kind = "proc-driver"

    def __init__(
        self, root: str, files: tuple[str, ...], binds: tuple[str, ...], reason: str
    ) -> None:
        super().__init__(reason)
        self.root = root
        self.source = root.rstrip("/") + PROC_DRIVER
        self.files = files
        self.binds = binds
        self._tmpfs = -1
        self._trees: list[tuple[str, int, bool]] = []

    def describe(self) -> str:
        """Describe what stays visible."""
        return f"mask {PROC_DRIVER}, showing {', '.join(self.files + self.binds)}"

    def prepare(self, host: "Rootfs") -> None:
        """Fill a detached tmpfs with copies, and clone the sources of mounts in it."""
        if _kernel_has_none():
            return
        self._tmpfs = kernel.new_tmpfs({"mode": "0555", "size": "1m"}, 0)
        for name in self.files:
            data = host.read_file(f"{PROC_DRIVER}/{name}", _MAX_PROC_FILE)
            if data is not None:
                masked = masked_params(data) if name == "params" else None
                self._copy(name, masked or data)
        for name in self.binds:
            self._clone(host, name)

    def _copy(self, name: str, data: bytes) -> None:
        fd = kernel.create_file(self._tmpfs, name, 0o444)
        try:
            write_all(fd, data, kernel.write)
        finally:
            os.close(fd)

    def _clone(self, host: "Rootfs", name: str) -> None:
        try:
            fd = host.open(f"{PROC_DRIVER}/{name}")
        except FileNotFoundError:
            return
        try:
            folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            tree = kernel.clone_tree(fd, f"{self.source}/{name}")
        finally:
            os.close(fd)
        self._trees.append((name, tree, folder))
        kernel.set_mount_attributes(tree, attributes_of(PROC_OPTIONS), f"{self.source}/{name}")

    def execute(self, container: "ContainerRootfs") -> None:
        """Mount the tmpfs and the clones in it, then make it read-only."""
        # Mode spec, which executes nothing, doesn't need this; the hook has imported it already.
        from gpuhook.base.container.changes import ContainerRootfs, Journal  # noqa: PLC0415

        if self._tmpfs < 0 or not container.exists(PROC_DRIVER):
            return
        target = container.mount_point(PROC_DRIVER, folder=True)
        if target is None:
            return
        try:
            container.attach(self._tmpfs, target, PROC_DRIVER)
        finally:
            os.close(target)
        with ContainerRootfs(os.dup(self._tmpfs), PROC_DRIVER, Journal()) as inside:
            for name, tree, folder in self._trees:
                _mount_inside(inside, name, tree, folder)
        # protects: proc-read-only
        kernel.set_mount_attributes(self._tmpfs, attributes_of(PROC_OPTIONS), PROC_DRIVER)

    def close(self) -> None:
        """Close the tmpfs and the clones."""
        for _, tree, _ in self._trees:
            os.close(tree)
        self._trees.clear()
        if self._tmpfs >= 0:
            os.close(self._tmpfs)
            self._tmpfs = -1

    def to_json(self) -> "dict[str, Any]":
        """Add what stays visible."""
        return {
            "kind": self.kind,
            "source": self.source,
            "destination": PROC_DRIVER,
            "options": list(PROC_OPTIONS),
            "visible": [*self.files, *self.binds],
            "reason": self.reason,
        }


def _kernel_has_none() -> bool:
    """Tell whether there is nothing to mask: every procfs shows the files of kernel drivers.

    Ours could be mounted with subset=pid, which shows no /proc/driver either.
    """
    return os.path.exists(os.path.dirname(PROC_DRIVER)) and not os.path.exists(PROC_DRIVER)


def _mount_inside(inside: "ContainerRootfs", name: str, tree: int, folder: bool) -> None:
    """Mount a clone in our tmpfs; it is unmounted together with that."""
    target = inside.mount_point(f"/{name}", folder=folder)
    if target is None:
        return
    try:
        inside.attach(tree, target, f"{PROC_DRIVER}/{name}")
    finally:
        os.close(target)
