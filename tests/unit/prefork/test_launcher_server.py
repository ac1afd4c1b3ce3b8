"""The launcher's reaction to every answer of a prefork server, with a fake server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launchers import PATIENCE, Installed
from timeouts import in_time

from gpuhook.prefork import instance, slots

PLAIN = '{"env": "NVIDIA_VISIBLE_DEVICES=all"}'
EDITED = json.dumps({"env": "NVIDIA_VISIBLE_DEVICES=all", "hooks": "x" * 100})
# A sham server: it has a server's descriptors, and answers one request.
SHAM = f"""
import os, sys, time
folder, launcher, act = sys.argv[1:]
place = os.open(folder, os.O_RDONLY)
program = os.open(launcher, os.O_PATH)
reader, writer = os.pipe()
both = os.open(f"/proc/self/fd/{{reader}}", os.O_RDWR)
for fd, number in ((both, 700), (place, 701), (program, 702)):
    os.dup2(fd, number)
os.closerange(3, 700)
for slot in range({slots.SLOT_COUNT}):
    reader, writer = os.pipe()
    os.dup2(writer, 1000 + slot)
    os.close(reader)
    os.close(writer)
for slot in range({slots.SLOT_COUNT}):
    os.dup2(1000 + slot, {slots.SLOTS} + slot)
for number, fd in ((700, {slots.REQUEST_PIPE}), (701, {slots.FOLDER_FD}), (702, {slots.LAUNCHER})):
    os.dup2(number, fd)
os.closerange(700, 1000 + {slots.SLOT_COUNT})
open(f"{{folder}}/{{os.getpid()}}", "w").close()
print(os.getpid(), flush=True)
question = os.read({slots.REQUEST_PIPE}, 4096)
slot, pid, about = question.decode().rstrip("\\n").split(" ", 2)
def answer(data):
    os.write({slots.SLOTS} + int(slot), data)
def whole(text):
    answer(b"taken\\n%s %d\\n" % (pid.encode(), len(text)) + text.encode())
try:
    exec(act)
except BrokenPipeError:
    pass
print(question.decode(), flush=True)
"""


class Sham:
    """A process with a server's descriptors, which reports when it has done its part."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.folder = folder

    def said(self) -> str:
        """Wait until the server exits; return the question that it got, or an empty text."""
        assert self.process.stdout is not None
        with in_time(60):
            return self.process.stdout.readline().rstrip("\n")

    @property
    def claims(self) -> list[str]:
        """Return the slots of the server that were claimed."""
        return [name for name in os.listdir(self.folder) if name.startswith(".")]


@contextmanager
def server(installed: Installed, act: str, launcher: Path | None = None) -> Iterator[Sham]:
    folder = Path(f"{installed.saved}{installed.config}", instance.FOLDER)
    folder.mkdir(0o700, exist_ok=True)
    words = ["-c", SHAM, str(folder), str(launcher or installed.bin / "gpu-py"), act]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield Sham(process, folder)
    finally:
        process.kill()
        process.communicate()
        for path in folder.iterdir():
            path.unlink()


@pytest.fixture
def ready(installed: Installed) -> Installed:
    """An installation with a bundle that requests devices, and a runtime that records its umask."""
    installed.program(
        installed.path / "runc",
        f'#!/bin/sh\necho runc "$@" >{installed.log}\numask >{installed.folder}/umask\n',
    )
    installed.configure()
    (installed.bundle / "config.json").write_text(PLAIN)
    (installed.bundle / "config.json").chmod(0o640)
    return installed


def create(installed: Installed) -> str:
    """Call the launcher as engines do; return the program that it starts next."""
    words = ("create", "--bundle", str(installed.bundle), "ID")
    with in_time(60):
        return installed.run(*words).split()[0]


def config(installed: Installed) -> str:
    assert sorted(os.listdir(installed.bundle)) == ["config.json"], "nothing else is left"
    return (installed.bundle / "config.json").read_text()


IN_PIECES = f"""
answer(b"tak"); time.sleep(0.1); answer(b"en\\n"); time.sleep(0.1)
answer(b"%s %d" % (pid.encode(), {len(EDITED)})); time.sleep(0.1); answer(b"\\n")
for byte in {EDITED!r}.encode(): answer(bytes([byte]))
"""
GOOD = {
    "at once": (f"whole({EDITED!r})", EDITED),
    "in pieces": (IN_PIECES, EDITED),
    "more than a pipe holds": ("whole('y' * 300_000)", "y" * 300_000),
    "more than it says": (f"whole({EDITED!r}); answer(b'more')", EDITED),
}


@pytest.mark.parametrize(("act", "text"), GOOD.values(), ids=GOOD.keys())
def test_the_servers_config_json_is_put_into_the_bundle(
    ready: Installed, act: str, text: str
) -> None:
    with server(ready, act) as sham:
        assert create(ready) == "runc"
        assert sham.said().split()[2:] == [str(ready.bundle), "ID"]
    assert config(ready) == text
    assert (ready.bundle / "config.json").stat().st_mode & 0o7777 == 0o640
    assert (ready.folder / "umask").read_text() == "0022\n"


def test_a_config_json_without_edits_stays_unchanged(ready: Installed) -> None:
    before = os.umask(0o077)
    try:
        with server(ready, "answer(b'taken\\n%s 0\\n' % pid.encode())"):
            assert create(ready) == "runc"
    finally:
        os.umask(before)
    assert config(ready) == PLAIN
    assert (ready.folder / "umask").read_text() == "0077\n", "it is as the caller had it"


BAD = {
    "no": "answer(b'taken\\nno\\n')",
    "no, at once": "answer(b'no\\n')",
    "nothing": "",
    "nothing more": "answer(b'taken\\n')",
    "for another process": "answer(b'taken\\n1 2\\n{}')",
    "without a length": "answer(b'taken\\n%s\\n' % pid.encode())",
    "an empty length": "answer(b'taken\\n%s \\n' % pid.encode())",
    "no number": "answer(b'taken\\n%s 1x\\n{}' % pid.encode())",
    "a negative length": "answer(b'taken\\n%s -2\\n{}' % pid.encode())",
    "a huge length": "answer(b'taken\\n%s 99999999999999999999\\n{}' % pid.encode())",
    "less than it says": "answer(b'taken\\n%s 200\\n{}' % pid.encode())",
    "killed in the midst": "answer(b'taken\\n%s 200\\n{}' % pid.encode()); os.kill(os.getpid(), 9)",
    "NULs": "answer(bytes(4096))",
    "an endless line": "answer(b'taken\\n'); [answer(b'x' * 4096) for _ in range(64)]",
    "not taken": "answer(b'%s 2\\n{}' % pid.encode())",
}


@pytest.mark.parametrize("act", BAD.values(), ids=BAD.keys())
def test_an_invalid_answer_of_the_server_is_left_to_python(ready: Installed, act: str) -> None:
    with server(ready, act):
        assert create(ready) == "python"
    assert config(ready) == PLAIN


@pytest.mark.parametrize("before", ["", "answer(b'taken\\n'); "], ids=["not taken", "taken"])
def test_a_late_server_changes_nothing(ready: Installed, before: str) -> None:
    """By then, the launcher has given up on the server and started Python."""
    begun = time.monotonic()
    late = f"{before}time.sleep({PATIENCE + 3}); whole({EDITED!r})"
    with server(ready, late) as sham:
        assert create(ready) == "python"
        assert time.monotonic() - begun >= PATIENCE
        sham.said()
    assert config(ready) == PLAIN


def test_a_killed_launcher_leaves_the_bundle_unchanged(ready: Installed) -> None:
    """It is killed before the answer or in the middle of it; the next start removes the rest."""
    words = [str(ready.bin / "gpu-py"), "create", "--bundle", str(ready.bundle), "ID"]
    env = {"PATH": f"{ready.path}:/usr/bin:/bin", "GPUHOOK_CONFIG": str(ready.config)}
    kill = f"os.kill(int(pid), {signal.SIGKILL.value}); time.sleep(0.1)"
    half = "answer(b'taken\\n%s 200\\n{' % pid.encode()); time.sleep(0.3)"
    for act in (f"{kill}; whole('{{}}')", f"{half}; {kill}; answer(b'}}')"):
        with server(ready, act) as sham:
            assert subprocess.run(words, env=env, check=False).returncode == -signal.SIGKILL
            sham.said()
        assert (ready.bundle / "config.json").read_text() == PLAIN
    assert (ready.bundle / "config.json.gpuhook").exists()
    with server(ready, f"whole({EDITED!r})"):
        assert create(ready) == "runc"
    assert config(ready) == EDITED


def test_a_config_json_that_cannot_be_written_is_left_to_python(ready: Installed) -> None:
    (ready.bundle / "config.json.gpuhook").mkdir()
    with server(ready, f"whole({EDITED!r})"):
        assert create(ready) == "python"
    assert (ready.bundle / "config.json").read_text() == PLAIN


# Who is asked --------------------------------------------------------------------------------


def test_server_of_another_launcher_is_not_asked(ready: Installed) -> None:
    with server(ready, f"whole({EDITED!r})", ready.bin / "gpuhook-prestart") as sham:
        assert create(ready) == "python"
        assert sham.claims == []


def test_stopped_server_is_not_asked(ready: Installed) -> None:
    with server(ready, f"whole({EDITED!r})") as sham:
        os.kill(sham.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sham.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert create(ready) == "python"
        assert sham.claims == []


def test_the_next_server_is_used_if_one_fails(ready: Installed) -> None:
    """The servers may have any order in the folder."""
    with server(ready, "answer(b'no\\n')"), server(ready, f"whole({EDITED!r})"):
        assert create(ready) == "runc"
    assert config(ready) == EDITED


@pytest.mark.parametrize(
    "name", ["1", "0", "-1", "x", "99999999999", "1/../2", " 1"], ids=lambda name: name or "empty"
)
def test_a_name_that_is_no_server_is_ignored(ready: Installed, name: str) -> None:
    with server(ready, f"whole({EDITED!r})") as sham:
        if "/" not in name:
            (sham.folder / name).touch()
        assert create(ready) == "runc"
    assert config(ready) == EDITED


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--bundle", "{}", "ID", "OTHER"],
        ["create", "--bundle", "{}/./../bundle", "ID"],
        ["create", "--bundle", "{}", "ID", "--pid-file", "/p"],
        ["create", "--bundle", "{}", "I D"],
        ["create", "--bundle", "{}", "I\nD"],
        ["create", "--bundle", "{}", "I" * 2000],
        ["create", "--bundle", "{}/"],
    ],
    ids=[
        "two ids",
        "dots",
        "an option after the id",
        "a space",
        "a line's end",
        "a long id",
        "no id",
    ],
)
def test_an_unusual_command_line_is_left_to_python(ready: Installed, words: list[str]) -> None:
    with server(ready, f"whole({EDITED!r})") as sham:
        assert ready.run(*(word.format(ready.bundle) for word in words)).startswith("python")
        assert sham.claims == []
    assert config(ready) == PLAIN


def test_a_start_is_left_to_python_if_all_slots_are_claimed(ready: Installed) -> None:
    with server(ready, f"whole({EDITED!r})") as sham:
        for slot in range(slots.SLOT_COUNT):
            (sham.folder / f".{sham.process.pid}.{slot}").touch()
        assert create(ready) == "python"
    assert config(ready) == PLAIN


def test_the_runtime_inherits_the_callers_signals_and_descriptors(ready: Installed) -> None:
    """This includes SIGPIPE, which the launcher ignores for a moment."""
    seen = ready.folder / "seen"
    ready.program(
        ready.path / "runc",
        f"#!/bin/sh\ngrep -E 'Sig(Ign|Blk)' /proc/self/status >{seen}\nls /proc/self/fd >>{seen}\n"
        f"echo runc >{ready.log}\n",
    )
    words = [str(ready.bin / "gpu-py"), "create", "--bundle", str(ready.bundle), "ID"]
    env = {"PATH": f"{ready.path}:/usr/bin:/bin", "GPUHOOK_CONFIG": str(ready.config)}
    found: dict[bool, list[str]] = {}

    def restore(ignored: bool) -> Callable[[], None]:
        def act() -> None:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN if ignored else signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if ignored else signal.SIG_DFL)

        return act

    given = os.open("/dev/null", os.O_RDONLY)
    try:
        for ignored in (False, True):
            (ready.bundle / "config.json").write_text(PLAIN)
            with server(ready, f"whole({EDITED!r})"):
                subprocess.run(
                    words, env=env, check=True, preexec_fn=restore(ignored), pass_fds=[given]
                )
            found[ignored] = seen.read_text().splitlines()
    finally:
        os.close(given)
    pipe = 1 << (signal.SIGPIPE - 1)
    masks = {ignored: int(lines[1].split()[1], 16) for ignored, lines in found.items()}
    assert not masks[False] & pipe
    assert masks[True] & pipe
    for lines in found.values():
        numbers = {int(line) for line in lines[2:]}
        assert given in numbers
        assert len(numbers) == 5, "the usual three, the given one, and the folder that ls reads"
