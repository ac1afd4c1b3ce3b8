"""Variables for a container's requests beyond its Ascend NPUs."""

from gpuhook.base.errors import RequestError, shown
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.request import sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.core.request.reader import RequestReader

OPTIONS = "ASCEND_RUNTIME_OPTIONS"
LISTS = "ASCEND_RUNTIME_MOUNTS"
SPLIT = "ASCEND_VNPU_SPECS"
NO_UB = "DISABLE_UB_MOUNT"
ENGINE_SOCKETS = "MOUNT_BY_RUNTIME_FOR_DP"

NODES_ONLY, VIRTUAL = "NODRV", "VIRTUAL"
BASE = "base"  # the list for containers that name none
# The name that all vNPUs share: ``all`` of a container that requests vNPUs.
EVERY_VNPU = "vnpus"

_LONGEST = 128  # characters, of the options and of a list's name
_LIST_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
_BOOLEANS = {"": False, "true": True, "false": False}
_MOST = 1 << 12  # vNPUs in all ranges together; a host has 16 for each of its NPUs
_MOST_LISTS = 1 << 6


class AscendOptions(Record):
    """A container's request other than NPUs.

    ``lists`` are the names of the host's lists of files that it gets. With ``nodes_only`` it
    gets none of them. With ``virtual`` its numbers mean vNPUs. With ``no_ub`` it gets no node
    of the UB bus.
    """

    lists: tuple[str, ...] = (BASE,)
    nodes_only: bool = False
    virtual: bool = False
    no_ub: bool = False

    def facts(self) -> list[tuple[str, str]]:
        """Return facts for display, each with its title."""
        return [("Lists of files", "none" if self.nodes_only else ", ".join(self.lists))]


def read(reading: "RequestReader", options: AscendOptions) -> None:
    """Read a container's options; RequestError if they are invalid."""
    if reading.devices is None:
        return
    env = reading.env
    if ENGINE_SOCKETS in env:
        reason = f"{ENGINE_SOCKETS} requests the engines' sockets, which no container gets"
        reading.ignored.append(("environment", reason))
    if env.get(SPLIT):
        raise RequestError(
            f"{SPLIT} asks to split an NPU, which gpuhook doesn't do",
            f"Make a vNPU with npu-smi, request its number, and set {OPTIONS}={VIRTUAL}",
        )
    words = option_words(env.get(OPTIONS, ""))
    options.nodes_only = NODES_ONLY in words
    options.virtual = VIRTUAL in words
    asked = env.get(LISTS, "")
    options.lists = list_names(asked if asked and reading.hears_environment([LISTS]) else "")
    options.no_ub = boolean(NO_UB, env.get(NO_UB, ""))
    if options.virtual:
        reading.found["selectors"] = vnpus(reading.found["selectors"])


def option_words(value: str) -> tuple[str, ...]:
    """Return the words of ASCEND_RUNTIME_OPTIONS, without duplicates; RequestError for others."""
    if len(value) > _LONGEST:
        raise RequestError(
            f"{OPTIONS} has {len(value)} characters", f"Use some of {NODES_ONLY},{VIRTUAL}"
        )
    words = tuple(dict.fromkeys(word.upper() for word in sources.items(value)))
    for word in words:
        if word not in (NODES_ONLY, VIRTUAL):
            raise RequestError(
                f"{shown(word)} isn't an option of {OPTIONS}", f"Use some of {NODES_ONLY},{VIRTUAL}"
            )
    return words


def list_names(value: str) -> tuple[str, ...]:
    """Return the names in ASCEND_RUNTIME_MOUNTS, without duplicates; RequestError if invalid."""
    names = tuple(dict.fromkeys(sources.items(value))) or (BASE,)
    if len(names) > _MOST_LISTS:  # protects: most-lists
        raise RequestError(
            f"{LISTS} names {len(names)} lists of files; the maximum is {_MOST_LISTS}",
            f"Name fewer lists in {LISTS}",
        )
    for name in names:
        if name.startswith(".") or len(name) > _LONGEST or not _LIST_CHARACTERS.issuperset(name):
            raise RequestError(
                f"{shown(name)} can't be the name of a list of files",
                f"Name lists in {LISTS} like their files, without .list",
            )
    return names


def boolean(variable: str, value: str) -> bool:
    """Return the value of True, False or an empty text; RequestError for another word."""
    found = _BOOLEANS.get(value.strip().lower())
    if found is None:
        raise RequestError(f"{variable} is {shown(value)}", f"Set {variable} to True or False")
    return found


def vnpus(names: "Iterable[str]") -> tuple[str, ...]:
    """Return the names, without duplicates, of vNPUs that a container requests by numbers.

    RequestError for more than any host has.
    """
    found: dict[str, None] = {}
    left = _MOST
    for name in names:
        numbers = _range(name)
        left -= len(numbers)
        if left < 0:  # protects: most-vnpus
            raise RequestError(
                f"The container requests more than {_MOST} vNPUs by ranges of numbers",
                "Request existing ones, or all; `gpuhook info` lists them",
            )
        found.update((f"vnpu-{number}", None) for number in numbers)
        if not numbers:
            found[_vnpu(name)] = None
    return tuple(found)


def _range(name: str) -> range:
    """Return the numbers in a number or a range, none for anything else."""
    first, dash, last = name.partition("-")
    last = last if dash else first
    is_range = _is_number(first) and _is_number(last)
    return range(int(first), int(last) + 1) if is_range else range(0)


def _vnpu(name: str) -> str:
    """Return the full name of a vNPU, for names other than a plain number."""
    if name.lower() == "all":
        return EVERY_VNPU
    word, _, number = name.rpartition("-")
    is_numbered = word and not _is_number(word) and _is_number(number)
    return f"vnpu-{int(number)}" if is_numbered else name


def _is_number(text: str) -> bool:
    return 0 < len(text) < 10 and text.isascii() and text.isdecimal()
