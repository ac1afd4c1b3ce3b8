"""A start with a full /run leaves a machine that goes on."""

from pathlib import Path

from booted import BUSYBOX, GIVEN, REQUEST, call
from harness.commands import Result, run

RUN = Path("/run")


def start(docker: tuple[str, ...]) -> Result:
    """Start a container that opens the GPUs it asks for."""
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    words = ["run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    return run([*docker, *words, BUSYBOX, "devopen", *nodes])


def test_a_container_starts_while_run_is_full(docker: tuple[str]) -> None:
    """Nothing that is saved there is needed: without it a start only takes longer."""
    filler = RUN / "filler"
    call("mount", "-o", "remount,size=64m", RUN)
    start(docker).ok()
    before = call("cat", "/proc/self/mountinfo")
    for path in (RUN / "gpuhook").rglob("*"):
        if path.is_file():
            path.unlink()
    try:
        run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"]).failed()
        full = start(docker)
    finally:
        filler.unlink()
    said = full.stderr.splitlines()
    if full.status != 0:  # the engine, too, keeps in there what it must
        assert "Traceback" not in full.stderr
        assert any("No space left" in line or "no space left" in line for line in said), said
    assert start(docker).ok().stdout.split()[1::2] == ["ENXIO", "ENXIO"]
    assert call("cat", "/proc/self/mountinfo") == before
