"""The commands of docs/tutorial/simulated.md, run in order from the first."""

import os
import re
from pathlib import Path

from booted import CARRIED, call
from harness.commands import run
from harness.images import REPOSITORY, image
from test_tutorial import BLOCK, FAILING  # of the integration test, which begins with step 2


def test_the_tutorial_commands_work_and_leave_nothing_behind() -> None:
    call("docker", "load", "--input", CARRIED / "images.tar")
    call("docker", "tag", image("debian"), "debian:12")
    text = (REPOSITORY / "docs/tutorial/simulated.md").read_text()
    settings = Path("/etc/docker/daemon.json")
    before = settings.read_bytes() if settings.exists() else None
    done = 0
    for commands, printed in BLOCK.findall(text):
        last = ""
        for command in commands.splitlines():
            words = f"PATH=/opt/gpuhook/bin:$PATH; {command}"
            result = run(["sh", "-c", words], cwd=REPOSITORY, timeout=300.0)
            assert (result.status != 0) == any(each in command for each in FAILING), str(result)
            last = result.stdout + result.stderr
            done += 1
        pattern = ".*".join(re.escape(part) for part in printed.strip().split("..."))
        assert re.search(pattern, last, re.DOTALL), f"{commands}\n{last}"
    assert done >= 20
    assert (settings.read_bytes() if settings.exists() else None) == before
    for left in ("/opt/gpuhook", "/run/gpuhook", "/var/lib/gpuhook", "/etc/gpuhook"):
        assert not Path(left).exists()
    assert not Path("/usr/local/bin/nvidia-ctk").is_symlink()
    links = [os.readlink(link) for link in Path("/dev/char").glob("*") if link.is_symlink()]
    assert not [link for link in links if link.startswith("/srv/gpus")]
