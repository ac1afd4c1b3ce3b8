"""A plan as settings of systemd: for an nspawn machine, for its unit, and for any other unit.

Sources: systemd.nspawn(5), systemd-nspawn(1), systemd.exec(5), systemd.resource-control(5).
"""

from collections.abc import Iterable, Iterator

from gpuhook.core.plan.operations import AddGroup, BindDevice, BindFile, Plan
from gpuhook.hpc.rootfs.node_writer import NodeWriter

_WRITABLE, _READ_ONLY = "Bind", "BindReadOnly"  # followed by Paths in a unit

# Escapes in paths: for nspawn's files, and for units, where white space separates words and quotes
# are removed. systemd 262 ignores a backslash before white space, and 252 a colon within quotes.
_ESCAPED = {char: f"\\{char}" for char in "\\:"}
_NSPAWNS = str.maketrans(_ESCAPED)
_UNITS = str.maketrans({**_ESCAPED, " ": '" "', "\t": '"\t"', '"': "'\"'", "'": '"\'"'})


class UnitWriter(NodeWriter):
    """Writer of a plan's settings for systemd.

    ``binds`` are the settings for mounts, each with source and destination, ``groups`` the
    process' groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.binds: list[tuple[str, str, str]] = []
        self.groups: list[int] = []

    def may_name(self, path: str) -> bool:
        """Tell whether a path is below /dev: systemd refuses others."""
        return path.startswith("/dev/")

    def by_number(self, major: int, minor: int) -> str:
        """Return the path of the link to a device."""
        return f"/dev/char/{major}:{minor}"

    def group(self, op: AddGroup) -> None:
        """Add a group."""
        self.groups.append(op.gid)

    def node(self, op: BindDevice) -> None:
        """Mount the node."""
        super().node(op)
        self.binds.append((_WRITABLE, op.source, op.destination))

    def mount(self, op: BindFile) -> None:
        """Mount a file or a folder."""
        name = _READ_ONLY if "ro" in op.options else _WRITABLE
        self.binds.append((name, op.source, op.destination))


def machine(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the lines for a machine's .nspawn file; ``env`` are single-line NAME=VALUE."""
    files = [f"{name}={value}" for name, value in _binds(_written(plan), _NSPAWNS)]
    variables = [f"Environment={_literal(each)}" for each in env]
    return ["[Files]", *files, *(["[Exec]", *variables] if variables else [])]


def allowed(plan: Plan) -> list[str]:
    """Return the lines for a machine's unit that allow its devices."""
    return ["[Service]", *(f"DeviceAllow={word}" for word in _written(plan).rules)]


def arguments(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the command-line arguments for systemd-nspawn.

    It allows every bound node in the unit that it creates, by the node's path, and systemd refuses
    paths outside of /dev: then it is kept in its caller's unit.
    """
    options = {_WRITABLE: "--bind", _READ_ONLY: "--bind-ro"}
    written = _written(plan)
    binds = [f"{options[name]}={value}" for name, value in _binds(written, _NSPAWNS)]
    unit = [f"--property=DeviceAllow={word}" for word in written.rules]
    if not all(op.source.startswith("/dev/") for op in written.nodes):
        unit = ["--keep-unit", "--register=no"]
    return [*binds, *(f"--setenv={each}" for each in env), *unit]


def service(plan: Plan, env: Iterable[str], *, own_root: bool) -> list[str]:
    """Return the lines for a unit; one with its own root (RootDirectory=) gets files, too."""
    written = _written(plan)
    paths = _binds(written, _UNITS) if own_root else ()
    binds = [f"{name}Paths={_unit(value)}" for name, value in paths]
    groups = [f"SupplementaryGroups={gid}" for gid in written.groups]
    variables = [f"Environment={_unit(_quoted(each))}" for each in env]
    allow = [f"DeviceAllow={_unit(word)}" for word in written.rules]
    return ["[Service]", *allow, *groups, *binds, *variables]


def warnings(plan: Plan) -> list[str]:
    """Return warnings about features that don't work in a machine with private users."""
    return [
        f"{op.source} is for the host's group {op.node.group}, which has no members in a machine "
        "with private users: set PrivateUsers=no in [Exec] there to use it"
        for op in _written(plan).nodes
        if op.node.group
    ]


def _written(plan: Plan) -> UnitWriter:
    return UnitWriter().write(plan.operations)


def _binds(written: UnitWriter, escaped: dict[int, str]) -> Iterator[tuple[str, str]]:
    for name, *paths in written.binds:
        yield name, ":".join(path.translate(escaped) for path in paths)


def _literal(word: str) -> str:
    """Return a word escaped for a .nspawn file, where a backslash is literal."""
    return word if _is_plain(word) else '"' + word.replace('"', '"\'"\'"') + '"'


def _is_plain(word: str) -> bool:
    return all(char.isalnum() or char in "_=,./:+@-" for char in word)


def _quoted(word: str) -> str:
    """Return a word quoted for systemd.syntax(7)."""
    if _is_plain(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _unit(value: str) -> str:
    return value.replace("%", "%%")
