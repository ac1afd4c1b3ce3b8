"""The spec files that a low-level runtime's own parser reads for command lines.

usage: unshare --mount python3 parser.py ROOT RUNTIME

The first line of the output has what the runtime prints about itself: {"version": text,
"help": {verb: text}}. Then each line of standard input is a command line as a JSON list of
words. The answer to it is {"specs": [path, ...], "logs": [path, ...], "status": number}.
"specs" are the *.json files that were opened and not written to. "logs" are the log files that
were written to, and "status" is the exit status.

The runtime runs in ROOT, with an empty /run, in its own folder. Each word of a command line,
and each end of a word, is a folder there with specs that no runtime can parse. So the runtime
reads the spec that the command line means, reports that it is broken, and starts nothing.
"""

import ctypes
import json
import os
import signal
import stat
import struct
import sys

WORK = "/run/parser"
SPECS = ("config.json", "other.json")
LOGS = ("log-1", "log-2", "log-3")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin"}
PATIENCE_S = 5
MAX_NAME = 255

# linux/fanotify.h and linux/mount.h
FAN_CLOEXEC, FAN_NONBLOCK = 1, 2
FAN_MARK_ADD, FAN_MARK_MOUNT = 1, 0x10
FAN_CLOSE_NOWRITE = 0x10
AT_FDCWD = -100
EVENT = struct.Struct("=IBBHQii")
MS_REC, MS_PRIVATE = 0x4000, 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> int:
    """Return the result of a C function; raise OSError if it is -1."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount(kind: str, place: str) -> None:
    os.makedirs(place, exist_ok=True)
    check(libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None))


def enter(root: str) -> None:
    """Make ``root`` our root, with private mounts for runtimes, and WORK our working folder."""
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    mount("tmpfs", root + "/run")
    if root != "/":
        mount("proc", root + "/proc")
        mount("tmpfs", root + "/dev")
        os.mknod(root + "/dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.chroot(root)
    mount("tmpfs", WORK)
    os.chdir(WORK)


def watch() -> int:
    """Return the descriptor that reports the files of WORK that are read and then closed."""
    group = check(libc.fanotify_init(FAN_CLOEXEC | FAN_NONBLOCK, os.O_RDONLY))
    flags, mask = FAN_MARK_ADD | FAN_MARK_MOUNT, ctypes.c_uint64(FAN_CLOSE_NOWRITE)
    check(libc.fanotify_mark(group, flags, mask, AT_FDCWD, WORK.encode()))
    return group


def seen(group: int) -> list[str]:
    """Return the paths of the files closed since the last call."""
    paths: list[str] = []
    while True:
        try:
            events = os.read(group, 1 << 16)
        except BlockingIOError:
            return paths
        while events:
            length, _, _, _, _, fd, _ = EVENT.unpack_from(events)
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.close(fd)
            events = events[length:]


def make_bundle(folder: str) -> None:
    for name in SPECS:
        if not os.path.lexists(f"{folder}/{name}"):
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}/{name}", "wb") as file:
                file.write(b"{")


def make_bundles(words: list[str]) -> None:
    """Make a bundle at each path that a parser could take for one."""
    for end in {word[start:] for word in words for start in range(len(word))}:
        folder = os.path.join(WORK, end)
        ours = folder.startswith(WORK + "/") and not end.endswith((*SPECS, *LOGS))
        if ours and len(os.fsencode(end)) <= MAX_NAME:
            make_bundle(folder)


def run(runtime: str, words: list[str], output: str = "/dev/null") -> int:
    """Run the runtime to its end; return its exit status, -SIGKILL if it took too long."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    files = [(os.POSIX_SPAWN_OPEN, fd, output if fd else "/dev/null", flags, 0) for fd in range(3)]
    child = os.posix_spawn(runtime, [runtime, *words], ENVIRONMENT, file_actions=files)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(PATIENCE_S)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    return os.waitstatus_to_exitcode(status)


def said(runtime: str, words: list[str]) -> str:
    """Return what the runtime prints."""
    run(runtime, words, "output")
    with open("output", "rb") as file:
        return file.read().decode()


def take_logs() -> list[str]:
    """Return the logs that were written to, and remove all logs."""
    sizes = {name: os.path.getsize(name) for name in LOGS if os.path.isfile(name)}
    for name in sizes:
        os.unlink(name)
    return [f"{WORK}/{name}" for name, size in sizes.items() if size]


def answer(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer each line of standard input."""
    root, runtime = sys.argv[1:]
    enter(root)
    helped = {verb: said(runtime, [verb, "--help"]) for verb in ("create", "run")}
    helped[""] = said(runtime, ["--help"])
    answer({"version": said(runtime, ["--version"]), "help": helped})
    group = watch()
    for line in sys.stdin:
        words = json.loads(line)
        make_bundle(WORK)
        make_bundles(words)
        seen(group)
        status = run(runtime, words)
        specs = sorted({path for path in seen(group) if path.endswith(SPECS)})
        answer({"specs": specs, "logs": take_logs(), "status": status})


main()
