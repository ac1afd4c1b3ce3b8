"""The driver's application profile that limits EGL to a container's own GPUs.

EGL enumerates every GPU of the machine; the setting EGLVisibleDGPUDevices, a mask with bit N
for /dev/nvidiaN, tells it which exist.

Hot path: imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PATH = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
MODE = 0o444
_BITS = 64  # the mask's width: the driver reads no more


def content(minors: "Iterable[int]") -> str | None:
    """Return the file's text for GPUs with these minor numbers, None if it would hide all.

    A minor beyond the mask can't be named in it and is left out. The number is not quoted:
    the driver's format has hexadecimal numbers, which JSON has not.
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


def minors(nodes: "Iterable[tuple[str, bool, int]]") -> tuple[int, ...]:
    """Return the minors of those (name, is a character device, minor) that are GPUs' nodes."""
    return tuple(minor for name, is_device, minor in nodes if is_device and _is_gpu(name))


def _is_gpu(name: str) -> bool:
    number = name.removeprefix("nvidia")
    return number != name and number.isascii() and number.isdecimal()
