"""What stands in the files that gpuhook makes in a container for NVIDIA's driver.

The application profile: EGL enumerates every GPU of the machine, and the setting
EGLVisibleDGPUDevices, a mask with bit N for /dev/nvidiaN, tells it which exist.

/proc/driver/nvidia/params: the driver's user-space libraries make missing device nodes by
themselves unless ModifyDeviceFiles is 0 there; in a container only the nodes that were given
may exist.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PROFILE_PATH = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
PROFILE_MODE = 0o444
_BITS = 64  # the mask's width: the driver reads no more
_MODIFIES = b"ModifyDeviceFiles: 1"
_KEEPS = b"ModifyDeviceFiles: 0"


def profile(minors: "Iterable[int]") -> str | None:
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


def gpu_minors(nodes: "Iterable[tuple[str, bool, int]]") -> tuple[int, ...]:
    """Return the minors of those (name, is a character device, minor) that are GPUs' nodes."""
    return tuple(minor for name, is_device, minor in nodes if is_device and _is_gpu(name))


def _is_gpu(name: str) -> bool:
    number = name.removeprefix("nvidia")
    return number != name and number.isascii() and number.isdecimal()


def masked_params(content: bytes) -> bytes | None:
    """Return the file with ModifyDeviceFiles at 0, None if it needs no change.

    Only a line that is exactly this setting counts; all other lines stay, and the last one
    ends in a newline.
    """
    lines = content.removesuffix(b"\n").split(b"\n")
    if _MODIFIES not in lines:
        return None
    return b"".join((_KEEPS if line == _MODIFIES else line) + b"\n" for line in lines)
