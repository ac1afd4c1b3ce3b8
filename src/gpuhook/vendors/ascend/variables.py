"""The variables by which containers say more than which of Ascend's NPUs they want."""

from gpuhook.ground.errors import RequestError, shown
from gpuhook.ground.oci.jsontext import Record
from gpuhook.start.request import sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.start.request.reader import Reading

OPTIONS = "ASCEND_RUNTIME_OPTIONS"
LISTS = "ASCEND_RUNTIME_MOUNTS"
SPLIT = "ASCEND_VNPU_SPECS"
NO_UB = "DISABLE_UB_MOUNT"
ENGINE_SOCKETS = "MOUNT_BY_RUNTIME_FOR_DP"

NODES_ONLY, VIRTUAL = "NODRV", "VIRTUAL"
BASE = "base"  # the list of a container that names none
# The name that all vNPUs have in common: ``all`` of a container that asks for vNPUs.
EVERY_VNPU = "vnpus"

_LONGEST = 128  # characters, of the options and of a list's name
_LIST_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
_BOOLEANS = {"": False, "true": True, "false": False}
_MOST = 1 << 12  # vNPUs that ranges have together; a machine has 16 for each of its NPUs
_MOST_LISTS = 1 << 6


class AscendOptions(Record):
    """What a container asks for beside NPUs.

    ``lists`` are the names of the host's lists of files that it gets. With ``nodes_only`` it
    gets none of them, with ``virtual`` its numbers mean vNPUs, with ``no_ub`` it gets no node
    of the UB bus.
    """

    lists: tuple[str, ...] = (BASE,)
    nodes_only: bool = False
    virtual: bool = False
    no_ub: bool = False

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to tell a person, each with its title."""
        return [("Lists of files", "none" if self.nodes_only else ", ".join(self.lists))]


def read(reading: "Reading", options: AscendOptions) -> None:
    """Fill in the options of a container; RequestError for what is wrong."""
    if reading.devices is None:
        return
    env = reading.env
    if ENGINE_SOCKETS in env:
        reason = f"{ENGINE_SOCKETS} asks for the engines' sockets, which no container is given"
        reading.ignored.append(("environment", reason))
    if env.get(SPLIT):
        raise RequestError(
            f"{SPLIT} asks to split an NPU, which gpuhook doesn't do",
            f"Make a vNPU with npu-smi, ask for it by its number, and set {OPTIONS}={VIRTUAL}",
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
    """Return the words of ASCEND_RUNTIME_OPTIONS, once each; RequestError for others."""
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
    """Return the names in ASCEND_RUNTIME_MOUNTS, once each; RequestError for what is no name."""
    names = tuple(dict.fromkeys(sources.items(value))) or (BASE,)
    if len(names) > _MOST_LISTS:  # protects: most-lists
        raise RequestError(
            f"{LISTS} names {len(names)} lists of files, and {_MOST_LISTS} is the most",
            f"Name fewer lists in {LISTS}",
        )
    for name in names:
        if name.startswith(".") or len(name) > _LONGEST or not _LIST_CHARACTERS.issuperset(name):
            raise RequestError(
                f"{shown(name)} can't be the name of a list of files",
                f"Name lists in {LISTS} as their files are called, without .list",
            )
    return names


def boolean(variable: str, value: str) -> bool:
    """Return what True, False or nothing means; RequestError for another word."""
    found = _BOOLEANS.get(value.strip().lower())
    if found is None:
        raise RequestError(f"{variable} is {shown(value)}", f"Set {variable} to True or False")
    return found


def vnpus(names: "Iterable[str]") -> tuple[str, ...]:
    """Return the names, once each, by which vNPUs are found that a container calls by numbers.

    RequestError for more than any machine has.
    """
    found: dict[str, None] = {}
    left = _MOST
    for name in names:
        numbers = _range(name)
        left -= len(numbers)
        if left < 0:  # protects: most-vnpus
            raise RequestError(
                f"The container asks for more than {_MOST} vNPUs by ranges of numbers",
                "Ask for those that there are, or for all; `gpuhook info` lists them",
            )
        found.update((f"vnpu-{number}", None) for number in numbers)
        if not numbers:
            found[_vnpu(name)] = None
    return tuple(found)


def _range(name: str) -> range:
    """Return the numbers that a number or a range means, none for what is no such thing."""
    first, dash, last = name.partition("-")
    last = last if dash else first
    is_range = _is_number(first) and _is_number(last)
    return range(int(first), int(last) + 1) if is_range else range(0)


def _vnpu(name: str) -> str:
    """Return by which name a vNPU is found that isn't called by its number alone."""
    if name.lower() == "all":
        return EVERY_VNPU
    word, _, number = name.rpartition("-")
    is_numbered = word and not _is_number(word) and _is_number(number)
    return f"vnpu-{int(number)}" if is_numbered else name


def _is_number(text: str) -> bool:
    return 0 < len(text) < 10 and text.isascii() and text.isdecimal()
