"""The prefork server: workers that it kills, modules that it loads, and its files."""

import ast
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.inventory import fingerprint
from gpuhook.prefork import instance, slots, snapshot, supervisor
from gpuhook.prefork.server import Server, WorkerHandle
from gpuhook.prefork.worker import ANSWERED, TAKEN
from gpuhook.vendors.registry import BUILT_IN


class Late:
    """A worker whose deadline has passed; it has reported ``word``, if any, and keeps running."""

    def __init__(self, server: Server, word: bytes) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            os.write(writer, word)
            signal.pause()
            os._exit(0)
        os.close(writer)
        if word:
            select.select([reader], [], [])
        self.handle = WorkerHandle(self.pid, -1, reader)
        self.handle.deadline = time.monotonic() - 60
        server._workers[reader] = self.handle
        server._poll.register(reader, select.POLLIN)

    def state(self) -> str:
        """Return the worker's state, as ps shows it."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.handle.report)


@pytest.fixture
def server() -> Server:
    made = Server.__new__(Server)
    made._workers, made._spare, made._poll = {}, None, select.poll()
    return made


def test_late_worker_is_killed(server: Server) -> None:
    late = Late(server, b"")
    try:
        server._kill_late()
        os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
        assert late.state() == "Z"
    finally:
        late.end()


def test_worker_that_has_answered_is_not_killed(server: Server) -> None:
    """Its report is still unread, because other work came first on a busy host."""
    late = Late(server, ANSWERED)
    try:
        server._kill_late()
        while (state := late.state()) in ("T", "R"):
            time.sleep(0.01)
        assert state == "S"
        assert late.handle.deadline == 0
    finally:
        late.end()


def test_a_worker_that_has_taken_its_request_gets_more_time(server: Server) -> None:
    """A worker is slow while a hundred others run at the same time."""
    late = Late(server, TAKEN)
    try:
        server._kill_late()
        assert late.state() in "SR"
        assert late.handle.deadline > time.monotonic()
        late.handle.deadline = time.monotonic()
        server._kill_late()
        os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
    finally:
        late.end()


@pytest.mark.protects(
    "others-names",
    "files of running prefork servers in other pid namespaces are kept",
    instead="file = os.open(name, os.O_RDONLY, dir_fd=FOLDER.fd) if name.isdecimal() else None",
)
def test_names_of_ended_servers_are_removed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name stays while its server runs, even if its number belongs to another pid namespace."""
    for name in ("1", "2", ".1.7", ".2.7", ".lock-1"):
        (tmp_path / name).touch()
    folder = StateDirectory.opened(str(tmp_path))
    monkeypatch.setattr(slots, "FOLDER", folder)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"x" if instance.take_name(folder, "1", for_life=True) else b"")
        signal.pause()
        os._exit(0)
    try:
        os.close(writer)
        assert os.read(reader, 1)
        slots.remove_forgotten()
        assert folder.names() == [".1.7", ".lock-1", "1"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        slots.remove_forgotten()
        assert folder.names() == [".lock-1"]
    finally:
        folder.close()
        os.close(reader)


def test_every_loaded_module_is_checked() -> None:
    files = snapshot._our_files()
    assert supervisor.__file__ in files
    assert sys.modules["gpuhook"].__file__ in files
    assert all(name.endswith(".py") for name in files)


SOURCES = Path(supervisor.__file__).parents[2]
LOADS = f"""
import sys
sys.path.append({str(SOURCES)!r})
from gpuhook import runtime_shim
from gpuhook.prefork import supervisor
from gpuhook.base.config.model import Config
supervisor._import_all(Config())
for name, module in sys.modules.items():
    print(name, getattr(module, "__file__", None))
"""
# A worker never uses these: it inherits configuration and inventory.
NOT_IN_WORKERS = {
    "gpuhook.base.config.loader",
    "gpuhook.base.config.source",
    "gpuhook.core.inventory.cache",
}
DISCOVERY = {
    "gpuhook.base.cgroup.answers",
    "gpuhook.vendors.nvidia.driver_files",
    "gpuhook.vendors.nvidia.reach",
    *(f"gpuhook.vendors.{name}.discover" for name in BUILT_IN),
}


def late_imports(source: str) -> Iterator[str]:
    """Yield the modules that a source's functions import."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                inside = (SOURCES / str(node.module).replace(".", "/")).is_dir()
                yield from (f"{node.module}.{alias.name}" for alias in node.names if inside)
                yield str(node.module)


# Slow to import, and needed for few containers. They are loaded before a container's mount
# namespace is entered: the edits of CDI specs are written into config.json.
DOCUMENTS = {"gpuhook.core.cdi.document", "gpuhook.core.cdi.unresolved"}
# Loaded only if a request is refused, also before the mount namespace is entered.
REFUSALS = {"gpuhook.core.suggest"}
# Loaded only if a container requests any free device, also before the namespace is entered.
CHOICE = {"gpuhook.core.records.choice"}
# Loaded only if the configuration declares vendors, and used nowhere else.
DECLARED = {"gpuhook.vendors.declared.names"}
# Loaded only if the configuration shares devices by MPS.
MPS = {"gpuhook.vendors.nvidia.mps", "gpuhook.vendors.nvidia.mps_mounts"}


def test_a_worker_imports_no_module_late() -> None:
    """After entering a container's mount namespace, it could load a module from the image."""
    words = [sys.executable, "-I", "-S", "-c", LOADS]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    ours = {name for name in loaded if name.startswith("gpuhook.") and loaded[name] != "None"}
    assert {"gpuhook.core.plan.spec_edits", "gpuhook.inject"} <= ours
    vendors = {f"gpuhook.vendors.{name}.vendor" for name in BUILT_IN}
    assert vendors <= ours, "else it is not noticed when they are replaced"
    assert not MPS & ours, "who shares nothing pays nothing"
    missing = {
        (name, other)
        for name in ours - NOT_IN_WORKERS
        for other in late_imports(Path(loaded[name]).read_text())
        if other not in {*loaded, *DISCOVERY, *DOCUMENTS, *CHOICE, *DECLARED, *REFUSALS, *MPS}
    }
    assert missing == set()


def test_a_worker_imports_no_module_late_for_a_declared_vendor() -> None:
    text = '[[gpuhook.vendors]]\nname = "maker"\nkind = "maker.com/npu"\n'
    text += 'variable = "MAKER_VISIBLE_DEVICES"\nnodes = ["/dev/maker{n}"]\n'
    code = LOADS.replace("model import Config\n", "loader import loads\n").replace(
        "Config()", f"loads({text!r})"
    )
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = {line.split(" ", 1)[0] for line in done.stdout.splitlines()}
    assert {*DECLARED, "gpuhook.vendors.declared.vendor"} <= loaded
    assert "gpuhook.vendors.declared.discover" not in loaded


def test_a_worker_imports_no_module_late_for_mps() -> None:
    code = LOADS.replace("model import Config\n", "loader import loads\n").replace(
        "Config()", """loads('gpuhook.mps.devices = "all"')"""
    )
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert loaded.keys() >= MPS
    late = {each for name in MPS for each in late_imports(Path(loaded[name]).read_text())}
    assert late <= loaded.keys()


@pytest.mark.parametrize("days", [20, -20])
def test_a_changed_clock_makes_a_file_count_as_old(
    days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a future time was made before the clock was set back, so it counts as old."""
    path = tmp_path / "file"
    path.touch()
    folder = StateDirectory.opened(str(tmp_path))
    try:
        monkeypatch.setattr(slots, "FOLDER", folder)
        assert not fingerprint.is_settled(str(path))
        assert not slots._is_older("file", 60.0)
        now = time.time() + days * 86400
        monkeypatch.setattr(time, "time", lambda: now)
        assert fingerprint.is_settled(str(path))
        assert slots._is_older("file", 60.0)
    finally:
        folder.close()
