"""Error messages of every program when standard output can't be written."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuhook.base.errors import printable
from gpuhook.monitor.host import streams

RUN = "from gpuhook.{} import main; main()"
NVIDIA_CLI = f"import sys; sys.argv[1:1] = ['', '']; {RUN.format('nvidia_cli.__main__')}"
CALLS = [
    ("gpuhook", RUN.format("tools.cli"), ["--help"]),
    ("gpuhook", RUN.format("tools.cli"), ["help", "install"]),
    ("nvidia-ctk", RUN.format("nvidia_cli.ctk"), ["--help"]),
    ("nvidia-container-cli", NVIDIA_CLI, ["--help"]),
]


def shell(script: str, code: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of gpuhook as ``"$@"`` of a shell script."""
    argv = ["sh", "-c", script, "sh", sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("program", "code", "words"), CALLS)
def test_a_full_disk_on_standard_output_is_reported(
    program: str, code: str, words: list[str]
) -> None:
    done = shell('"$@" >/dev/full', code, words)
    assert done.returncode == 1
    assert done.stderr == (
        f"{program}: Standard output can't be written: No space left on device. "
        "Check where it leads.\n"
    )


@pytest.mark.parametrize(("program", "code", "words"), CALLS)
def test_a_closed_pipe_reader_causes_no_error_message(
    program: str, code: str, words: list[str]
) -> None:
    done = shell('{ "$@" || echo "status $?" >&2; } | exec true', code, words)
    assert done.stderr in ("", "status 1\n"), program


@pytest.mark.parametrize(("program", "code", "words"), CALLS)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_streams_are_no_error(
    program: str, code: str, words: list[str], closed: str
) -> None:
    done = shell(f'"$@" {closed}', code, words)
    assert (done.returncode, done.stderr) == (0, ""), program
    assert (done.stdout == "") == closed.startswith(">&-")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1:strict", "ascii:strict"])
def test_unencodable_characters_do_not_fail_a_command(tmp_path: Path, encoding: str) -> None:
    """File names may contain any bytes, and values any characters."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "\u6f22.toml").write_text("[nvidia-container-cli]\nroot = '/\u6f22'\n")
    for words in (["show"], ["validate"]):
        words += ["--config", f"{folder}/\u6f22.toml"]
        code = RUN.format("tools.cli")
        argv = [sys.executable, "-c", code, "config", *words]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(argv, capture_output=True, check=False, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"/\\udcff/" in done.stdout


def test_undecodable_bytes_of_a_name_are_written_unchanged() -> None:
    code = (
        "import sys; from gpuhook.monitor.host import streams\n"
        "with streams.written('x'): sys.stdout.write('/\\udcff/\\ud800/\\u6f22')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, check=True, env=env)
    assert done.stdout == b"/\xff/\\ud800/\\u6f22"


@pytest.mark.parametrize("path", ["/dev/null/x", "/" + "x" * 300, "/dev/null/\x1b]0;x\x07\udcff"])
def test_an_unusable_path_is_named_in_one_escaped_line(path: str) -> None:
    done = shell('"$@"', RUN.format("tools.cli"), ["driver-folder", "--remove", path])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"gpuhook: {printable(path)} can't be used: ")
    assert done.stderr.count("\n") == 1


def test_errors_unrelated_to_standard_output_are_raised() -> None:
    with pytest.raises(FileNotFoundError), streams.written("gpuhook"):
        os.stat("/nonexistent/file")
    with pytest.raises(ConnectionRefusedError), streams.written("gpuhook"):
        raise ConnectionRefusedError


ENDING = """
import atexit
from gpuhook.monitor.host import streams

class Torn:
    def __del__(self): print("torn apart", flush=True)

torn = Torn()
atexit.register(print, "tidied up")

def command():
    print("done")
    {}

streams.run("gpuhook", command)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(-1)", 255),
    ],
)
def test_exit_status_and_exit_handlers_of_python_are_kept(end: str, status: int) -> None:
    done = shell('"$@"', ENDING.format(end), [])
    assert (done.stdout, done.stderr, done.returncode) == ("done\ntidied up\n", "", status)


@pytest.mark.parametrize(
    ("end", "said"),
    [("raise SystemExit('said')", "said\n"), ("raise ValueError('said')", "ValueError: said\n")],
)
def test_exit_messages_and_exceptions_reach_stderr(end: str, said: str) -> None:
    done = shell('"$@"', ENDING.format(end), [])
    assert done.returncode == 1
    assert done.stderr.endswith(said)
    assert "done\ntidied up\n" in done.stdout
