"""The lines of Slurm's gres.conf: what each device is called there, its files, the cores near it.

Source: gres.conf(5) of Slurm 22.05, and how its gres/gpu plugin numbers devices. Pure.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpuhook.ground.errors import ConfigError, shown

NAME = "gpu"  # for all accelerators: Slurm holds jobs back from files of this plugin's devices
_MOST = 64  # characters of a type
_NO_WORD = re.compile(r"[^a-z0-9_.-]+")
_PATH = re.compile(r"/[A-Za-z0-9_./:+@-]*")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*")
_KEYWORDS = ("no_consume", "mig", "none", "null")  # words that mean something to Slurm, or nothing
# Whose application reads which variable for the devices that it may use; others read none that
# Slurm knows.
_FLAGS = {"nvidia": "nvidia_gpu_env", "amd": "amd_gpu_env", "intel_gpu": "intel_gpu_env"}
_NO_FLAG = "no_gpu_env"


class Entry(NamedTuple):
    """One device: its vendor's name, its type, files, and the cores near it ("": any).

    ``links`` says how many links join the device called ``id`` with others, by their ids.
    """

    vendor: str
    type: str
    files: tuple[str, ...]
    cores: str = ""
    id: str = ""
    links: Mapping[str, int] = {}


def word(model: str, vendor: str) -> str:
    """Return a product's name as a type: small letters, digits and ``_.-``, a letter first.

    What Slurm itself finds by NVML contains it, so that either way of writing gres.conf goes with
    the same jobs. A number first would be taken for a count.
    """
    text = _NO_WORD.sub("_", model.lower().replace(" mig ", " ")).strip("_.-")
    text = text.removeprefix(f"{vendor}_").strip("_.-")[:_MOST].rstrip("_.-")
    if not text or text in _KEYWORDS:
        return f"{vendor}_{text}".strip("_")
    return text if text[0].isalpha() else f"{vendor}_{text}"


def text(entries: Iterable[Entry], node: str) -> str:
    """Return the lines of gres.conf for a node, and as comments what slurm.conf needs.

    Slurm numbers devices by their types in slurm.conf's order, and within a type in the order of
    these lines; so they are kept together. ConfigError for what no line can hold.
    """
    if not _NODES.fullmatch(node):
        raise ConfigError(
            f"{shown(node)} can't be a NodeName of Slurm's",
            "Give the name of this node in slurm.conf with --node",
        )
    ordered = _by_type(entries)
    counts = Counter(each.type for each in ordered)
    words = ",".join(f"{NAME}:{each}:{count}" for each, count in counts.items())
    lines = [
        "# Written by `gpuhook slurm gres`. slurm.conf needs the same types in the same order:",
        f"#   GresTypes={NAME}",
        f"#   NodeName={node} Gres={words}" if words else "#   no Gres for this node",
        f"NodeName={node} AutoDetect=off",
        *(_line(each, node, _links(each, ordered)) for each in ordered),
    ]
    return "\n".join(lines) + "\n"


def _by_type(entries: Iterable[Entry]) -> list[Entry]:
    groups: dict[str, list[Entry]] = {}
    for each in entries:
        groups.setdefault(each.type, []).append(each)
    return [each for group in groups.values() for each in group]


def _links(entry: Entry, ordered: list[Entry]) -> str:
    """Return the number of links to each device by Slurm's numbers, -1 for itself; "" if none."""
    if not entry.links:
        return ""
    return ",".join(
        "-1" if other is entry else str(entry.links.get(other.id, 0)) for other in ordered
    )


def _line(entry: Entry, node: str, links: str) -> str:
    for path in entry.files:
        if not _PATH.fullmatch(path):
            raise ConfigError(
                f"gres.conf can't express the path {shown(path)}",
                "Name a driver root without blanks, brackets, commas and quotes in config.toml",
            )
    key = "MultipleFiles" if len(entry.files) > 1 else "File"
    parts = [
        f"NodeName={node}",
        f"Name={NAME}",
        f"Type={entry.type}",
        f"{key}={','.join(entry.files)}",
    ]
    if entry.cores:
        parts.append(f"Cores={entry.cores}")
    if links:
        parts.append(f"Links={links}")
    return " ".join([*parts, f"Flags={_FLAGS.get(entry.vendor, _NO_FLAG)}"])


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in rising order as Slurm writes them: 0-3,8."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
