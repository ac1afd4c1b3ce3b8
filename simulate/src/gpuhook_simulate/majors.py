"""Major numbers for simulated drivers, and the text of /proc/devices with them."""

from collections.abc import Sequence

from gpuhook.base.errors import SimulateError
from gpuhook.base.host import proc

# The kernel's range for dynamic majors, in its order (Documentation/admin-guide/devices.txt).
_DYNAMIC_MAJORS = range(511, 383, -1)
_BLOCKS = "Block devices:"


def machines_devices() -> str:
    """Return the text of this host's /proc/devices."""
    return proc.read("/proc/devices").decode("ascii", "replace")


def free_majors(names: Sequence[str], proc_devices: str) -> dict[str, int]:
    """Return an unused major of character devices for each named driver.

    ``proc_devices``, the text of /proc/devices, has the used ones. SimulateError if there are too
    few.
    """
    used = set()
    for line in proc_devices.partition(_BLOCKS)[0].split("\n"):
        number = line.strip(" ").partition(" ")[0]
        if number.isdecimal():
            used.add(int(number))
    free = [major for major in _DYNAMIC_MAJORS if major not in used]
    if len(free) < len(names):
        raise SimulateError(
            f"This host has {len(free)} free major numbers for {len(names)} drivers",
            "Simulate fewer kinds of devices",
        )
    return dict(zip(names, free, strict=False))


def devices_text(majors: dict[str, int], proc_devices: str) -> str:
    """Return the text of /proc/devices with these drivers' majors added."""
    characters, heading, blocks = proc_devices.partition(_BLOCKS)
    added = "".join(f"{major:3d} {name}\n" for name, major in majors.items())
    return f"{characters.rstrip()}\n{added}\n{heading}{blocks}"
