"""The whole content of a container, listed inside it, to compare two ways to create it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.bundles import Bundle
from harness.commands import Result
from harness.driver import Driver, run_with_driver_in_kernel

HOSTS = f"/usr/lib/{os.uname().machine}-linux-gnu"
FOLDERS = {"debian": HOSTS, "lib64": "/usr/lib64"}  # of the libraries of an image
FOLDER = "directory 755 0:0 "
# A CDI spec can't know the image, so libraries are in the folders that they have on the host. The
# tests reverse this before a comparison. These other differences come from it and from CDI specs:
OF_DOCUMENTS = {
    ("files", HOSTS): FOLDER,
    ("files", f"{HOSTS}/vdpau"): FOLDER,
    ("files", "/usr/lib64/vdpau"): FOLDER,
    # the image's own ldconfig finds the libraries' folders by this file
    ("files", "/etc/ld.so.conf.d"): FOLDER,
    ("files", "/etc/ld.so.conf.d/00-gpuhook.conf"): "regular file 644 0:0 ",
    ("digests", "/etc/ld.so.conf.d/00-gpuhook.conf"): "",
    # so that no other program adds devices a second time
    ("variables", "NVIDIA_VISIBLE_DEVICES"): "void",
    # with a CDI spec, no variable asks for capabilities
    ("variables", "NVIDIA_DRIVER_CAPABILITIES"): "",
}
# Files that engines themselves write into every container.
_ENGINES_OWN = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/.containerenv")
_CACHE = "/etc/ld.so.cache"  # its entries are compared instead
# The driver's manifests. A hook writes them and others mount them, so their content is compared.
_COPIES = ("/etc/OpenCL/", "/etc/vulkan/", "/usr/share/egl/", "/usr/share/glvnd/")
_SCRIPT = r"""
busybox find / -path /sys -prune -o -path '/proc/*' -prune -o -path '/dev/pts/*' -prune -o \
    -print0 | busybox xargs -0 busybox stat -c 'entry %F|%a %u:%g|%t:%T|%s|%d:%i|%N'
busybox awk '{print "mount", $5 "|" $6 "|" $7}' /proc/self/mountinfo
copies='/usr/share/egl /usr/share/glvnd'
for file in $(busybox find /etc /proc/driver/nvidia $copies -type f 2>/dev/null); do
    echo "digest $(busybox md5sum $file)"
done
[ ! -e /etc/ld.so.cache ] || ldconfig -p | busybox sed -n 's/^\t/row /p'
busybox env | busybox sed 's/^/variable /'
"""
LIST = ("sh", "-c", _SCRIPT)


@dataclass(frozen=True)
class Content:
    """Content of a container.

    ``nodes`` maps a device node to its mode, owner and numbers. ``files`` maps a path to a
    description: device and inode for a file of the host, the size for other files. ``mounts``
    maps the places of all mounts, except device nodes, to their options. ``digests`` maps
    files in /etc, the driver's manifests and its files in /proc to checksums of their content.
    ``rows`` maps the names in the loader's cache to their paths.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def beyond(self, base: "Content") -> "Content":
        """Return the content that a container made in the same way without devices lacks.

        The driver's files in /proc are always included, because the base has files of other
        GPUs.
        """
        parts = {
            name: {
                key: value
                for key, value in mine.items()
                if theirs.get(key) != value or key.startswith("/proc/driver/nvidia/")
            }
            for name, mine, theirs in self._with(base)
        }
        return Content(**parts)

    def _with(self, other: "Content") -> list[tuple[str, dict[str, str], dict[str, str]]]:
        return [(name, mine, getattr(other, name)) for name, mine in vars(self).items()]

    def differences(self, other: "Content") -> dict[tuple[str, str], tuple[str, str]]:
        """Return the differences: field and key -> the two values, empty where one is missing."""
        found = {}
        for name, mine, theirs in self._with(other):
            for key in sorted({*mine, *theirs}):
                pair = mine.get(key, ""), theirs.get(key, "")
                if pair[0] != pair[1]:
                    found[name, key] = pair
        return found

    def moved(self, folder: str, to: str) -> "Content":
        """Return a copy in which the content of one folder is in another folder."""
        parts = {
            name: {
                key.replace(f"{folder}/", f"{to}/"): value.replace(f"{folder}/", f"{to}/")
                for key, value in mine.items()
            }
            for name, mine in vars(self).items()
        }
        return Content(**parts)


def listed(result: Result) -> Content:
    """Parse the output of ``LIST`` in a container that succeeded."""
    lines: dict[str, list[str]] = {}
    for line in result.ok().stdout.splitlines():
        kind, _, rest = line.partition(" ")
        lines.setdefault(kind, []).append(rest)
    made = Content()
    for line in lines["mount"]:
        place, options, tag = line.split("|")
        if not place.startswith(_COPIES):
            made.mounts[place] = f"{options} {tag.partition(':')[0]}"
    for line in lines["entry"]:
        _add_entry(made, line)
    for digest, path in (line.split("  ", 1) for line in lines["digest"]):
        if path not in (*_ENGINES_OWN, _CACHE):
            made.digests[path] = digest
    for row in lines.get("row", []):
        name, path = row.split(" => ")
        made.rows.setdefault(name, path)  # the loader takes the first entry
    for name, sign, value in (line.partition("=") for line in lines["variable"]):
        if sign:
            made.variables[name] = value
    made.variables.pop("HOSTNAME", None)
    return made


def of_bundle(
    bundle: Bundle, runtime: str | Path, driver: Driver, config: Path, env: Sequence[str]
) -> Content:
    """Return the content of the container that a low-level runtime or gpu-py makes of a bundle."""
    bundle.command(*LIST)
    bundle.environ(*env)
    return listed(
        run_with_driver_in_kernel(bundle, runtime, driver, {"GPUHOOK_CONFIG": str(config)})
    )


def unexplained(
    reference: Content, content: Content, kind: str
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the unexplained differences between the reference and a CDI spec's container.

    ``kind`` is the kind of the image.
    """
    content = content.moved(f"{HOSTS}/vdpau", HOSTS).moved(HOSTS, FOLDERS[kind])
    found = reference.differences(content)
    return {
        key: pair
        for key, pair in found.items()
        if key not in OF_DOCUMENTS or not pair[1].startswith(OF_DOCUMENTS[key])
    }


def _add_entry(made: Content, line: str) -> None:
    kind, mode, numbers, size, inode, name = line.split("|")
    path, _, target = (part.strip("'") for part in name.partition(" -> "))
    if kind == "character special file":
        made.nodes[path] = f"{mode} {numbers}"
        made.mounts.pop(path, None)  # a node is either made or mounted from the host
        return
    is_host = path in made.mounts and kind.startswith("regular")
    what = inode if is_host else target or ("" if kind == "directory" else size)
    if path not in (*_ENGINES_OWN, _CACHE):
        made.files[path] = f"{kind} {mode} {what}"
