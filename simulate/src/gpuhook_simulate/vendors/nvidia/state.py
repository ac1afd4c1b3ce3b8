"""The mutable state of a simulated machine, as text files in a folder of its root.

The libraries read them (c/state.c, c/nvml_events.c), so that a running process sees every change;
docs/simulate.md describes their format. The options of the build are stored in the same folder,
because later changes need them.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpuhook.base.errors import SimulateError
from gpuhook.base.host import lock
from gpuhook.base.host.files import check_way
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia.machine import SimulatedGpu, SimulatedMachine, make_machine
from gpuhook_simulate.vendors.nvidia.options import Failure, Options

FOLDER = "simulate"
LOST, MIG, EVENTS, ACTIVITY = "lost", "mig", "events", "activity"
_BUILT = "built.json"
_PATIENCE = 60.0  # seconds to wait for other changes; each takes only a moment


@dataclass(frozen=True, slots=True)
class BuildState:
    """The options from which a root was built; ``library_dir`` is its library folder."""

    options: Options
    driver_version: str
    library_dir: str


def lost_text(gpus: Iterable[SimulatedGpu]) -> str:
    """Return the text of the lost GPUs: a number or UUID in each line."""
    return "".join(f"{gpu.index}\n" for gpu in gpus if gpu.lost)


def mig_text(gpus: Iterable[SimulatedGpu]) -> str:
    """Return the text with a line for each GPU in MIG mode, and one for each MIG device.

    The first has only the GPU's number; the second has also UUID, profile, ids of the GPU and
    the compute instance, the minors of both, and the first memory slice.
    """
    lines = []
    for gpu in gpus:
        lines += [f"{gpu.index}"] if gpu.mig_enabled else []
        for mig in gpu.migs:
            numbers = (mig.gi, mig.ci, mig.gi_cap, mig.ci_cap, mig.start)
            lines.append(f"{gpu.index} {mig.uuid} {mig.profile.name} {' '.join(map(str, numbers))}")
    return "".join(f"{line}\n" for line in lines)


def time_text() -> str:
    """Return the current time in the activity file's format: seconds since 1970."""
    now = time.time_ns() // 1000
    return f"{now // 10**6}.{now % 10**6:06d}"


def make(tree: Tree, state: BuildState, machine: SimulatedMachine) -> None:
    """Create the state folder of a new machine."""
    tree.folder(FOLDER)
    tree.text(f"{FOLDER}/{EVENTS}", "")
    tree.text(f"{FOLDER}/{ACTIVITY}", f"{time_text()} boot\n")
    save(tree.root, state, machine)


def save(root: str, state: BuildState, machine: SimulatedMachine) -> None:
    """Write the machine's current state, each file atomically."""
    texts = {
        LOST: lost_text(machine.gpus),
        MIG: mig_text(machine.gpus),
        _BUILT: json.dumps(asdict(state), default=_plain, indent=2) + "\n",
    }
    for name, content in texts.items():
        tree = Tree(root)
        new = f"{FOLDER}/.{name}.new"
        tree.text(new, content)
        os.replace(tree.path(new), tree.path(f"{FOLDER}/{name}"))


def _plain(value: object) -> object:
    return value.value if isinstance(value, Failure) else sorted(value)  # type: ignore[call-overload]


def load(root: str) -> BuildState:
    """Return the options from which a root was built; SimulateError if they are missing."""
    try:
        with open(os.path.join(root, FOLDER, _BUILT), encoding="utf-8") as file:
            data = json.load(file)
        return BuildState(_options(data["options"]), data["driver_version"], data["library_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        raise SimulateError(
            f"{root} has no simulated NVIDIA machine that can be changed",
            "Build it with gpuhook simulate DIR --gpus N first",
        ) from None


def _options(fields: dict[str, Any]) -> Options:
    lists = {name: tuple(fields[name]) for name in ("models", "minors")}
    sets = {name: frozenset(fields[name]) for name in ("unplugged", "lost", "features")}
    mig = {int(index): tuple(names) for index, names in fields["mig"].items()}
    failure = Failure(fields["failure"]) if fields["failure"] else None
    return Options(**{**fields, **lists, **sets, "mig": mig, "failure": failure})


def load_machine(root: str) -> SimulatedMachine:
    """Return the current machine; SimulateError if its options are missing."""
    state = load(root)
    return make_machine(state.options, state.driver_version)


def append(root: str, name: str, line: str) -> None:
    """Add a line to a file of the state folder, in one write."""
    path = os.path.join(root, FOLDER, name)
    # With these flags, open() neither blocks on a fifo nor follows a link.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """Lock the machine against other changes; SimulateError if a change can't be written.

    UntrustedPathError if another user could redirect root.
    """
    check_way(root)  # protects: changed-way
    folder = os.path.join(root, FOLDER)
    try:
        if os.path.islink(folder):
            raise SimulateError(f"{folder} is a link", "Build the machine again, which has none")
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        load(root)  # raises the error with its reason
        raise
    try:
        if not lock.take(fd, _PATIENCE):
            raise SimulateError(
                f"Another process has been changing the machine below {root} for "
                f"{_PATIENCE:.0f} seconds",
                "Wait until it has ended, or end it if it hangs, and run this again",
            )
        yield
    except OSError as error:
        raise SimulateError(
            f"The simulated machine can't be changed ({error})",
            "Run the command as root, and check that the file system has room",
        ) from error
    finally:
        os.close(fd)
