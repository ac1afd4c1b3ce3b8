"""A plan as settings of systemd: of a machine of nspawn, of its unit, and of any other unit.

Sources: systemd.nspawn(5), systemd-nspawn(1), systemd.exec(5), systemd.resource-control(5).
"""

from collections.abc import Iterable, Iterator

from gpuhook.start.plan.operations import (
    AddGroup,
    AllowDevice,
    BindDevice,
    BindFile,
    Plan,
    SetVariable,
)
from gpuhook.start.plan.writer import MountWriter

_WRITABLE, _READ_ONLY = "Bind", "BindReadOnly"  # before Paths in a unit

# In paths: of nspawn's, and of a unit's, where white space parts words and quotes are taken off.
# systemd 262 sees no backslash before white space, and 252 no colon within quotes.
_ESCAPED = {char: f"\\{char}" for char in "\\:"}
_NSPAWNS = str.maketrans(_ESCAPED)
_UNITS = str.maketrans({**_ESCAPED, " ": '" "', "\t": '"\t"', '"': "'\"'", "'": '"\'"'})


class UnitWriter(MountWriter):
    """What settings of systemd need of a plan.

    ``binds`` are the settings for mounts, each with source and destination; ``rules`` are the
    devices to allow, ``groups`` those of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.binds: list[tuple[str, str, str]] = []
        self.groups: list[int] = []
        self.nodes: list[BindDevice] = []
        self._allowed: list[AllowDevice] = []

    @property
    def rules(self) -> list[str]:
        """The devices to allow: by their paths, which stay if a driver gets another major."""
        nodes = [op for op in self.nodes if op.source.startswith("/dev/")]
        paths = {(op.major, op.minor): op.source for op in nodes}
        return [
            f"{paths.get((op.major, op.minor), f'/dev/char/{op.major}:{op.minor}')} {op.access}"
            for op in self._allowed
        ]

    def rule(self, op: AllowDevice) -> None:
        """Allow a device."""
        self._allowed.append(op)

    def variable(self, op: SetVariable) -> None:
        """Leave it: ``fstab.settings`` has the variables."""

    def group(self, op: AddGroup) -> None:
        """Add a group."""
        self.groups.append(op.gid)

    def node(self, op: BindDevice) -> None:
        """Mount the node."""
        self.nodes.append(op)
        self.binds.append((_WRITABLE, op.source, op.destination))

    def mount(self, op: BindFile) -> None:
        """Mount a file or a folder."""
        name = _READ_ONLY if "ro" in op.options else _WRITABLE
        self.binds.append((name, op.source, op.destination))


def machine(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the lines for a machine's .nspawn file; ``env`` are NAME=VALUE, of one line each."""
    files = [f"{name}={value}" for name, value in _binds(_written(plan), _NSPAWNS)]
    variables = [f"Environment={_literal(each)}" for each in env]
    return ["[Files]", *files, *(["[Exec]", *variables] if variables else [])]


def allowed(plan: Plan) -> list[str]:
    """Return the lines for the unit of a machine: which devices it may open."""
    return ["[Service]", *(f"DeviceAllow={word}" for word in _written(plan).rules)]


def arguments(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the words for systemd-nspawn on a command line.

    For the unit that it makes it names every bound node by where that is, and systemd refuses those
    that aren't in /dev: then it stays in its caller's unit.
    """
    options = {_WRITABLE: "--bind", _READ_ONLY: "--bind-ro"}
    written = _written(plan)
    binds = [f"{options[name]}={value}" for name, value in _binds(written, _NSPAWNS)]
    unit = [f"--property=DeviceAllow={word}" for word in written.rules]
    if not all(op.source.startswith("/dev/") for op in written.nodes):
        unit = ["--keep-unit", "--register=no"]
    return [*binds, *(f"--setenv={each}" for each in env), *unit]


def service(plan: Plan, env: Iterable[str], *, own_root: bool) -> list[str]:
    """Return the lines for a unit; one with a root of its own (RootDirectory=) gets files, too."""
    written = _written(plan)
    paths = _binds(written, _UNITS) if own_root else ()
    binds = [f"{name}Paths={_unit(value)}" for name, value in paths]
    groups = [f"SupplementaryGroups={gid}" for gid in written.groups]
    variables = [f"Environment={_unit(_quoted(each))}" for each in env]
    allow = [f"DeviceAllow={_unit(word)}" for word in written.rules]
    return ["[Service]", *allow, *groups, *binds, *variables]


def warnings(plan: Plan) -> list[str]:
    """Return what doesn't work in a machine with users of its own, a sentence each."""
    return [
        f"{op.source} is for the host's group {op.node.group}, in which nobody is where a machine "
        "has users of its own: set PrivateUsers=no in [Exec] there to use it"
        for op in _written(plan).nodes
        if op.node.group
    ]


def _written(plan: Plan) -> UnitWriter:
    return UnitWriter().write(plan.operations)


def _binds(written: UnitWriter, escaped: dict[int, str]) -> Iterator[tuple[str, str]]:
    for name, *paths in written.binds:
        yield name, ":".join(path.translate(escaped) for path in paths)


def _literal(word: str) -> str:
    """Return a word as a .nspawn file takes it: there a backslash stands for itself."""
    return word if _is_plain(word) else '"' + word.replace('"', '"\'"\'"') + '"'


def _is_plain(word: str) -> bool:
    return all(char.isalnum() or char in "_=,./:+@-" for char in word)


def _quoted(word: str) -> str:
    """Return a word as systemd.syntax(7) takes it."""
    if _is_plain(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _unit(value: str) -> str:
    return value.replace("%", "%%")
