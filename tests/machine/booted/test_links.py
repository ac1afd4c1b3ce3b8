"""A link of another user where the kernel follows none (fs.protected_symlinks, set by systemd)."""

from pathlib import Path

from booted import call
from harness.commands import run

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
LINK = Path("/tmp/daemon.json")
TARGET = Path("/srv/daemon.json")


def test_an_error_names_the_owner_of_an_untrusted_link(installed: None) -> None:
    TARGET.write_text("{}\n")
    call(*NOBODY, "ln", "-s", TARGET, LINK)
    words = ("--engine=docker", f"--config={LINK}", "--state-dir=/srv/state")
    try:
        assert "Permission denied" in run(["cat", LINK]).failed().stderr
        said = run(["gpuhook", "install", *words]).failed().stderr
        assert f"the link {LINK}, which user 65534 made" in said
        assert "Run this as root" not in said
        said = run(["gpuhook", "cdi", "validate", LINK]).failed().stderr
        assert "it is a link in a folder where other users may write" in said
        assert TARGET.read_text() == "{}\n"
    finally:
        LINK.unlink()
        TARGET.unlink()
