"""Files in the repository: sources and texts, no built or downloaded binaries."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = (".png", ".ico")


def tracked() -> list[Path]:
    """Return the tracked files that exist."""
    words = ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def is_binary(path: Path) -> bool:
    """Tell whether a file holds a NUL byte, as every archive and ELF file does."""
    return b"\0" in path.read_bytes()


def test_no_binary_is_tracked() -> None:
    assert [path for path in tracked() if path.suffix not in PICTURES and is_binary(path)] == []


def test_binary_files_are_recognised(tmp_path: Path) -> None:
    archive, text = tmp_path / "a.whl", tmp_path / "b.txt"
    archive.write_bytes(b"PK\x03\x04\x14\x00")
    text.write_text("text\n")
    assert is_binary(archive)
    assert not is_binary(text)
