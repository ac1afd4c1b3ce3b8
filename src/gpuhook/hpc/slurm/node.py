"""The Slurm node of this host, and the number of its devices in slurm.conf. Pure.

Sources: slurm.conf(5), gres.conf(5), and Slurm's parse_config.c.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpuhook.hpc.slurm.gres import NAME

_MOST = 1 << 16  # names of one list; Slurm has fewer nodes
_DEFAULT = "DEFAULT"  # a line with defaults for the nodes of the lines after it
_SETTINGS = re.compile(r"(\w+)\s*=\s*(\"[^\"\n]*|\S+)")
_NAMES = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # in a list; commas in brackets don't separate names
_RANGES = re.compile(r"\[([0-9,-]+)\]")
_GRES = re.compile(r"(?:[^,(]|\([^)]*\))+")
_COUNT = re.compile(r"([0-9]{1,9})([kmgtp]?)")

Line = Mapping[str, str]  # of a Slurm file: its keys in lower case, and their values


class SlurmNode(NamedTuple):
    """The node names of this host; from slurm.conf if ``gpus`` has its number of devices there."""

    names: frozenset[str]
    gpus: int | None = None

    def has(self, line: Line) -> bool:
        """Tell whether a line of gres.conf applies to this node; without a name, it always does."""
        return "nodename" not in line or not self.names.isdisjoint(_nodes(line["nodename"]))


@functools.lru_cache(maxsize=64)  # many lines are for the same nodes
def _nodes(text: str) -> frozenset[str]:
    return frozenset(expanded(text))


def lines(text: str) -> list[Line]:
    """Return the settings of each line of a text without comments."""
    found = (_SETTINGS.findall(line) for line in text.split("\n"))
    return [{key.lower(): value.lstrip('"') for key, value in each} for each in found if each]


def node_here(slurm_conf: Iterable[Line], hostname: str) -> SlurmNode:
    """Return a host's node, by the lines of slurm.conf and the host's name."""
    hosts = frozenset((hostname, hostname.partition(".")[0]))
    default = ""
    names, gpus = set[str](), 0
    for line in slurm_conf:
        nodes = expanded(line.get("nodename", ""))
        if nodes == [_DEFAULT]:
            default = line.get("gres", default)
            continue
        machines = expanded(line.get("nodehostname", "")) or nodes
        here = {node for node, machine in zip(nodes, machines, strict=False) if machine in hosts}
        gpus += len(here) * count(line.get("gres", default))
        names |= here
    return SlurmNode(frozenset(names), gpus) if names else SlurmNode(hosts)


def count(gres: str) -> int:
    """Return the number of the plugin's devices in a node's Gres: gpu:h100:4(S:0-1),nic:2."""
    found = 0
    for each in _GRES.findall(gres):
        name, *rest = each.partition("(")[0].strip().lower().split(":")
        if name == NAME:
            number = _COUNT.fullmatch(rest[-1]) if rest else None
            power = " kmgtp".index(number[2] or " ") if number else 0
            found += int(number[1]) << 10 * power if number else 1
    return found


def expanded(text: str, most: int = _MOST) -> list[str]:
    """Return the names in a Slurm list: /dev/x[0,2-3],/dev/y7."""
    return [name for each in _NAMES.findall(text) for name in _expanded(each, most)]


def _expanded(name: str, most: int) -> list[str]:
    head, *rest = _RANGES.split(name)
    choices = [[head]]
    for ranges, after in zip(rest[::2], rest[1::2], strict=True):
        numbers = [number for part in ranges.split(",") for number in _range(part, most)]
        choices.append([f"{number}{after}" for number in numbers])
    return ["".join(parts) for parts in itertools.islice(itertools.product(*choices), most)]


def _range(text: str, most: int) -> list[str]:
    """Return the numbers of a range, padded to the digits of its first number."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        return []
    numbers = range(int(first), min(int(last or first), int(first) + most) + 1)
    return [str(number).zfill(len(first)) for number in numbers]
