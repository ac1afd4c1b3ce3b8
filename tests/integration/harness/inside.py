"""View of the GPUs from inside a container, read from its output."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.commands import Result

GPU_MAJOR = 195

# mknod comes last, because until then /dev has only the nodes that the container was given.
SCRIPT = """
devopen --see gpu-node $(busybox find /dev -name 'nvidia*' -type c)
[ -z "MINORS" ] || devopen --make /dev/by-hand MAJOR MINORS
[ -z "LIBRARIES" ] || for name in LIBRARIES; do
    echo "library $(dlprobe $name)"
done
"""


@dataclass
class Inside:
    """View from one container.

    ``nodes`` maps a node's path to the result of open() and its device numbers. ``by_hand``
    maps a GPU minor to the result of open() for a node made inside. ``libraries`` maps a name
    to the path and the device:inode that the dynamic linker found.
    """

    nodes: dict[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    by_hand: dict[int, str] = field(default_factory=dict)
    libraries: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def gpu_minors(self) -> set[int]:
        """The minors of the GPUs whose nodes exist."""
        numbers = [number for _, number in self.nodes.values()]
        return {minor for major, minor in numbers if major == GPU_MAJOR and minor < 254}


def look(minors: Iterable[int] = (), libraries: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the command to run inside; ``minors`` are the GPU nodes to make by hand."""
    script = SCRIPT.replace("MAJOR", str(GPU_MAJOR))
    script = script.replace("MINORS", " ".join(str(minor) for minor in minors))
    return ("sh", "-c", script.replace("LIBRARIES", " ".join(libraries)))


def seen(result: Result) -> Inside:
    """Parse the output of ``look`` in a container that succeeded."""
    found = Inside()
    for line in result.ok().stdout.splitlines():
        kind, *words = line.split()
        if kind == "gpu-node":
            path, opened, numbers, *_ = words
            major, minor = (int(part, 16) for part in numbers.split(":"))
            found.nodes[path] = (opened, (major, minor))
        elif kind == "by-hand":
            found.by_hand[int(words[0])] = words[1]
        elif kind == "library":
            found.libraries[words[0]] = (words[1], words[2])
    return found
