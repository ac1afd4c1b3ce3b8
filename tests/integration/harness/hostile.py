"""Attacks with bundles that are really started: their preparation and their permitted results."""

from pathlib import Path

from harness.bundles import Bundle, GpuBundle
from harness.commands import Result
from harness.snapshot import nothing_left

FOLDER = "usr/lib/x86_64-linux-gnu"


def mount_volume(bundle: Bundle, source: Path, destination: str, *options: str) -> None:
    volume = {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": ["rbind", *options],
    }
    bundle.change(lambda spec: spec["mounts"].append(volume))


def refused(result: Result, *words: str) -> str:
    """Return the error of a container that didn't start: one sentence, no traceback.

    crun doesn't pass on the messages of a hook, so ``words`` aren't required where a hook
    failed in crun.
    """
    assert result.status != 0, result
    assert "Traceback" not in result.stderr, result
    assert len(result.stderr) < 8192, "the message repeats what the image said"
    for word in () if "error executing hook" in result.stderr else words:
        assert word in result.stderr, result
    return result.stderr


def change_image(bundle: Bundle, script: str) -> None:
    """Run a shell script in the bundle's root, which only its namespace sees."""
    bundle.call("sh", "-ec", script, cwd=bundle.root).ok()


def start(bundle: GpuBundle, *untouched: Path, config: Path | None = None) -> Result:
    """Run the container, and check that the host and ``untouched`` are unchanged."""
    with nothing_left(*untouched, pid=bundle.namespace.pid):
        return bundle.start(config)
