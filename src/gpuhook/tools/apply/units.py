"""A plan as settings of systemd: of a machine of nspawn, of its unit, and of any other unit.

What settings have no words for is what config.json hasn't in mode ``spec``. Sources:
systemd.nspawn(5), systemd-nspawn(1), systemd.exec(5), systemd.resource-control(5).
"""

from collections.abc import Iterable, Iterator

from gpuhook.start.plan import spec_edits
from gpuhook.start.plan.operations import (
    AddGroup,
    AllowDevice,
    BindDevice,
    BindFile,
    Operation,
    Plan,
)
from gpuhook.start.plan.spec_edits import MakeNode

# In paths: of nspawn's, and of a unit's, where white space parts words and quotes are taken off.
# systemd 262 sees no backslash before white space, and 252 no colon within quotes.
_ESCAPED = {char: f"\\{char}" for char in "\\:"}
_NSPAWNS = str.maketrans(_ESCAPED)
_UNITS = str.maketrans({**_ESCAPED, " ": '" "', "\t": '"\t"', '"': "'\"'", "'": '"\'"'})


def machine(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the lines for a machine's .nspawn file; ``env`` are NAME=VALUE, of one line each."""
    files = [f"{name}={value}" for name, value in _binds(plan, _NSPAWNS)]
    variables = [f"Environment={_literal(each)}" for each in env]
    return ["[Files]", *files, *(["[Exec]", *variables] if variables else [])]


def allowed(plan: Plan) -> list[str]:
    """Return the lines for the unit of a machine: which devices it may open."""
    return ["[Service]", *(f"DeviceAllow={word}" for word in _rules(plan))]


def arguments(plan: Plan, env: Iterable[str]) -> list[str]:
    """Return the words for systemd-nspawn on a command line.

    For the unit that it makes it names every bound node by where that is, and systemd refuses those
    that aren't in /dev: then it stays in its caller's unit.
    """
    options = {"Bind": "--bind", "BindReadOnly": "--bind-ro"}
    binds = [f"{options[name]}={value}" for name, value in _binds(plan, _NSPAWNS)]
    nodes = [op.source for op in plan.operations if isinstance(op, BindDevice)]
    unit = [f"--property=DeviceAllow={word}" for word in _rules(plan)]
    if not all(source.startswith("/dev/") for source in nodes):
        unit = ["--keep-unit", "--register=no"]
    return [*binds, *(f"--setenv={each}" for each in env), *unit]


def service(plan: Plan, env: Iterable[str], *, own_root: bool) -> list[str]:
    """Return the lines for a unit; one with a root of its own (RootDirectory=) gets files, too."""
    names = {"Bind": "BindPaths", "BindReadOnly": "BindReadOnlyPaths"}
    paths = _binds(plan, _UNITS) if own_root else ()
    binds = [f"{names[name]}={_unit(value)}" for name, value in paths]
    groups = [f"SupplementaryGroups={op.gid}" for op in plan.operations if isinstance(op, AddGroup)]
    variables = [f"Environment={_unit(_quoted(each))}" for each in env]
    allow = [f"DeviceAllow={_unit(word)}" for word in _rules(plan)]
    return ["[Service]", *allow, *groups, *binds, *variables]


def undone(plan: Plan) -> list[Operation]:
    """Return the steps that settings have no words for."""
    return spec_edits.undone(plan)


def warnings(plan: Plan) -> list[str]:
    """Return what doesn't work in a machine with users of its own, a sentence each."""
    closed = [op for op in plan.operations if isinstance(op, BindDevice) and op.node.group]
    return [
        f"{op.source} is for the host's group {op.node.group}, in which nobody is where a machine "
        "has users of its own: set PrivateUsers=no in [Exec] there to use it"
        for op in closed
    ]


def _binds(plan: Plan, escaped: dict[int, str]) -> Iterator[tuple[str, str]]:
    for op in spec_edits.steps(plan):
        if isinstance(op, (MakeNode, BindFile)):
            name = "Bind" if isinstance(op, MakeNode) else "BindReadOnly"
            paths = (op.source, op.destination)
            yield name, ":".join(path.translate(escaped) for path in paths)


def _rules(plan: Plan) -> list[str]:
    """Return the devices to allow: by their paths, which stay if a driver gets another major."""
    nodes = [op for op in plan.operations if isinstance(op, BindDevice)]
    paths = {(op.major, op.minor): op.source for op in nodes if op.source.startswith("/dev/")}
    found = []
    for op in plan.operations:
        if isinstance(op, AllowDevice):
            path = paths.get((op.major, op.minor), f"/dev/char/{op.major}:{op.minor}")
            found.append(f"{path} {op.access}")
    return found


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
