"""/proc/driver/nvidia/params as a container should see it.

The driver's user-space libraries make missing device nodes by themselves unless
ModifyDeviceFiles is 0 there; in a container only the nodes that were given may exist.

Hot path: imports nothing.
"""

_MODIFIES = b"ModifyDeviceFiles: 1"
_KEEPS = b"ModifyDeviceFiles: 0"


def masked(content: bytes) -> bytes | None:
    """Return the file with ModifyDeviceFiles at 0, None if it needs no change.

    Only a line that is exactly this setting counts; all other lines stay, and the last one
    ends in a newline.
    """
    lines = content.removesuffix(b"\n").split(b"\n")
    if _MODIFIES not in lines:
        return None
    return b"".join((_KEEPS if line == _MODIFIES else line) + b"\n" for line in lines)
