"""Three machines on one network: node1 runs the tests, which send commands to all of them.

scripts/lib/machine-networked boots them. Each runs this file as a service, which reads a line
with the words of a command and its input. The service runs the command as root, and returns
its result. No other machine is on that network.
"""

import json
import shlex
import socket
import socketserver
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PORT = 7070
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Node:
    """One of the three machines."""

    number: int

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number}"

    def run(self, *words: str | Path, stdin: str = "") -> "Result":
        """Run a command on the machine; OSError if the machine is off."""
        argv = [str(word) for word in words]
        ran.note(argv)
        with socket.create_connection((self.address, PORT), timeout=5.0) as connection:
            connection.settimeout(TIMEOUT_S + 10)
            connection.sendall(json.dumps([argv, stdin]).encode() + b"\n")
            with connection.makefile("rb") as answer:
                status, *texts = json.loads(answer.readline())
        return Result((f"{self.name}:", *argv), status, *texts)

    def call(self, *words: str | Path, stdin: str = "") -> str:
        """Run a command on the machine, and return its output; the command must succeed."""
        return self.run(*words, stdin=stdin).ok().stdout

    def script(self, *lines: str) -> str:
        """Run shell lines on the machine, and return their output; each line must succeed."""
        return self.call("sh", "-e", stdin="\n".join(lines) + "\n")

    def write(self, path: str | Path, text: str) -> None:
        """Write a file on the machine, and make the folders above it."""
        quoted = shlex.quote(str(path))
        self.call("sh", "-ec", f'mkdir -p "$(dirname {quoted})"; cat >{quoted}', stdin=text)

    def power_off(self) -> None:
        """Turn the machine off like a power cut: no services are stopped, no messages are sent."""
        with suppress(OSError, ValueError):  # the connection breaks without an answer
            self.run("systemctl", "poweroff", "--force", "--force")

    def is_up(self) -> bool:
        """Tell whether the machine has booted and takes commands."""
        try:
            return self.run("systemctl", "is-active", "docker").status == 0
        except (OSError, ValueError):
            return False


NODES = FIRST, SECOND, THIRD = tuple(Node(number) for number in (1, 2, 3))


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        argv, stdin = json.loads(self.rfile.readline())
        try:
            done = subprocess.run(
                argv, input=stdin.encode(), capture_output=True, timeout=TIMEOUT_S, check=False
            )
            texts = [text.decode(errors="replace") for text in (done.stdout, done.stderr)]
            answer = [done.returncode, *texts]
        except (OSError, subprocess.TimeoutExpired) as error:
            answer = [127, "", str(error)]
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    _Server(("0.0.0.0", PORT), _Handler).serve_forever()  # noqa: S104 # its network is its own
    sys.exit()

import ran  # noqa: E402 # the service needs neither
from harness.commands import Result  # noqa: E402
