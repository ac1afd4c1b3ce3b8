"""The machine is up, as Debian boots it."""

import subprocess


def test_nothing_failed_at_boot() -> None:
    words = ["systemctl", "list-units", "--failed", "--plain", "--no-legend"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == ""
