"""Forbidden in sources and scripts: signals by process id, and walks through users' folders.

Signals are sent by descriptors, from one module only. The id of an exited process soon belongs
to another, and no shell holds a process. No shell script that root runs walks a user's folder:
that would query whatever is mounted there, and follow whatever is put there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import calls, of_all

REPOSITORY = Path(__file__).parents[2]

SENDING = ("os.kill", "os.killpg", "signal.pthread_kill")
SENDING_METHODS = (".kill", ".killpg", ".terminate", ".send_signal", ".pidfd_send_signal")
ALLOWED_TO_SEND = {"base/host/signals.send: _signal.pidfd_send_signal"}


def sending(module: str, text: str) -> list[str]:
    """Return the places and calls by which a module sends signals."""
    return [
        f"{module}.{function}: {name}"
        for function, name, _ in calls(ast.parse(text))
        if name in SENDING or name.endswith(SENDING_METHODS)
    ]


def test_only_the_signals_module_sends_signals() -> None:
    found = {each for item in of_all().items() for each in sending(*item)}
    assert found == ALLOWED_TO_SEND


def test_signal_sending_calls_are_detected() -> None:
    for text in ("os.kill(1, 9)", "process.kill()", "child.terminate()", "libc.kill(1, 9)",
                 "signal.pidfd_send_signal(fd, 9)", "a.send_signal(9)",
                 "os.killpg(1, 9)"):  # fmt: skip
        assert sending("x", text), text
    assert not sending("x", "signals.send(fd, 9)")


# In shell scripts -----------------------------------------------------------------------------

KILLS = re.compile(r"(?<![\w./-])(?:/\S*/)?(p?kill|killall5?|skill|snice|fuser|timeout)(?![\w-])")
WALKS = re.compile(
    r"(?<![\w-])(rm\s+(-\S*[rR]|--recursive)\S*|find\s|(chown|chmod|chgrp|cp|restorecon)\s+"
    r"(-\S*[aR]|--recursive)\S*|du\s|ls\s+-\S*R|grep\s+-\S*[rR])"
)
# Words of a line -> why it sends no signal by number, or walks through no folder of users.
ALLOWED_KILLS = {
    "systemctl kill --kill-who=main ": "by systemd, which holds its processes",
    '{kind="timeout"}': "a label of a series, in a rule for Prometheus",
}
ALLOWED_WALKS = {
    "find -H /usr/lib/gpuhook ": "the package's own folder",
    "$(find -H /usr/lib/gpuhook -": "as above",
    "find -H /usr/lib/gpuhook/@FOLDER@ ": "an addition's own folder",
    "find -H /usr/lib/gpuhook/gpuhook": "as above",
    'rm -rf "$@"': "the package's own folders, which postinst names",
    "rm -rf /run/gpuhook/launcher": "root's",
    "rm -rf --one-file-system /run/gpuhook": "root's, once what users may use there is detached",
    "rm -rf /var/lib/gpuhook": "root's, all of it 0700 or files",
    "restorecon -RF /usr/bin/gpu-py /run/gpuhook": "root's; labels follow no link",
    "cp -a %{root_of}": "at build time",
}


def shell_scripts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file that a shell or systemd runs on users' hosts."""
    for top in ("launchers", "packaging"):
        for path in sorted((REPOSITORY / top).rglob("*")):
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                text = path.read_text()
                is_script = re.match(r"#!\s*/bin/(ba|da)?sh\b", text) is not None
                if is_script or path.suffix in (".spec", ".service", ".yaml", ".tpl"):
                    yield str(path.relative_to(REPOSITORY)), text


def found(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return the lines of a script that contain a command, without comments."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.split("\n")]
    return [line for line in lines if pattern.search(line)]


@pytest.mark.parametrize(("pattern", "allowed"), [(KILLS, ALLOWED_KILLS), (WALKS, ALLOWED_WALKS)])
def test_shell_scripts_contain_no_kill_or_recursive_commands(
    pattern: re.Pattern[str], allowed: dict[str, str]
) -> None:
    lines = [(name, line) for name, text in shell_scripts() for line in found(pattern, text)]
    assert [each for each in lines if not any(part in each[1] for part in allowed)] == []
    assert [part for part in allowed if not any(part in line for _, line in lines)] == []
    names = {name for name, _ in shell_scripts()}
    assert {"launchers/gpuhook", "packaging/slurm/epilog", "packaging/rpm/gpuhook.spec"} <= names


def test_kill_and_recursive_commands_in_scripts_are_detected() -> None:
    for line in ("kill -9 1", "  kill -HUP $MAINPID", "ExecReload=/bin/kill -HUP $MAINPID",
                 "pkill -f x", "a | xargs kill", "killall x", "fuser -k /x",
                 "timeout 5 x"):  # fmt: skip
        assert found(KILLS, line), line
    for line in ("rm -rf x", "rm -fr x", "rm --recursive x", "find x -delete", "chown -R a x",
                 "cp -a x y", "grep -r x y"):  # fmt: skip
        assert found(WALKS, line), line
    assert not found(KILLS, "# kill it")
    assert not found(WALKS, "rm -f /etc/gpuhook/config.toml")
