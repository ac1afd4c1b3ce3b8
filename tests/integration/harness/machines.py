"""Templates of the machines that scripts/test boots, made at their first use."""

from harness.commands import run
from harness.images import REPOSITORY

# Each row is a script below scripts/lib and its arguments.
NEEDED = (
    ("machine-emulated", "trixie", "--get"),
    ("machine-root", "bookworm"),
)


def fetch(words: tuple[str, ...]) -> None:
    """Make the template of one of NEEDED."""
    script, *arguments = words
    run([REPOSITORY / "scripts/lib" / script, *arguments], timeout=1800.0).ok()
