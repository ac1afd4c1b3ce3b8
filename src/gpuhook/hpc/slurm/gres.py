"""Lines of Slurm's gres.conf: each device's type, its files, and the cores near it. Pure.

Source: gres.conf(5) of Slurm 22.05, and the numbering of devices in its gres/gpu plugin.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpuhook.base.errors import ConfigError, shown

NAME = "gpu"  # for all accelerators: Slurm restricts jobs' access to this plugin's files
_MOST = 64  # characters of a type
_NO_WORD = re.compile(r"[^a-z0-9_.-]+")
_PATH = re.compile(r"/[A-Za-z0-9_./:+@-]*")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*")
_KEYWORDS = ("no_consume", "mig", "none", "null")  # words with a meaning for Slurm, or placeholders
# Flags for the variables with which applications of a vendor select devices; other vendors'
# applications read no variable that Slurm knows.
_FLAGS = {"nvidia": "nvidia_gpu_env", "amd": "amd_gpu_env", "intel_gpu": "intel_gpu_env"}
_NO_FLAG = "no_gpu_env"


class GresEntry(NamedTuple):
    """One device: its vendor's name, its type, files, and the cores near it ("": any).

    ``links`` has the number of links from the device ``id`` to others, by their ids.
    """

    vendor: str
    type: str
    files: tuple[str, ...]
    cores: str = ""
    id: str = ""
    links: Mapping[str, int] = {}


def word(model: str, vendor: str) -> str:
    """Return a product's name as a type: lower-case letters, digits and ``_.-``, a letter first.

    Slurm's own names from NVML contain it, so that jobs work with both ways of writing gres.conf. A
    leading number would be read as a count.
    """
    text = _NO_WORD.sub("_", model.lower().replace(" mig ", " ")).strip("_.-")
    text = text.removeprefix(f"{vendor}_").strip("_.-")[:_MOST].rstrip("_.-")
    if not text or text in _KEYWORDS:
        return f"{vendor}_{text}".strip("_")
    return text if text[0].isalpha() else f"{vendor}_{text}"


def text(entries: Iterable[GresEntry], node: str) -> str:
    """Return the lines of gres.conf for a node, with the lines for slurm.conf as comments.

    Slurm numbers devices by their types in slurm.conf's order, and within a type in the order of
    these lines; so each type's lines are adjacent. ConfigError for values that a line can't hold.
    """
    if not _NODES.fullmatch(node):
        raise ConfigError(
            f"{shown(node)} can't be a NodeName of Slurm",
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


def _by_type(entries: Iterable[GresEntry]) -> list[GresEntry]:
    groups: dict[str, list[GresEntry]] = {}
    for each in entries:
        groups.setdefault(each.type, []).append(each)
    return [each for group in groups.values() for each in group]


def _links(entry: GresEntry, ordered: list[GresEntry]) -> str:
    """Return the number of links to each device by Slurm's numbers, -1 for itself; "" if none."""
    if not entry.links:
        return ""
    return ",".join(
        "-1" if other is entry else str(entry.links.get(other.id, 0)) for other in ordered
    )


def _line(entry: GresEntry, node: str, links: str) -> str:
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
    """Return numbers in ascending order in Slurm's format: 0-3,8."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
