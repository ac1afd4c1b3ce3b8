"""Release of memory without loss of its content."""

import ctypes
import mmap
import os
from pathlib import Path

from gpuhook.cluster.kubelet_endpoint.supervisor import give_back

SIZE = 8 << 20


def resident() -> int:
    """Return the number of bytes of mapped files that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[2])
    return pages * mmap.PAGESIZE


def test_released_library_memory_is_read_again_from_its_file(tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    path = tmp_path / "library"
    path.write_bytes(content)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # as for a library, no page is still to be written
        mapped = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ)
    with mapped:
        assert mapped[:] == content
        before = resident()
        give_back()
        assert before - resident() > SIZE // 2
        assert mapped[:] == content


def test_written_pages_are_kept_when_memory_is_released(tmp_path: Path) -> None:
    """Written pages are kept even if read-only now, as the loader leaves a library's tables."""
    path = tmp_path / "library"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    with mapped:
        mapped[:4] = b"mine"
        give_back()
        assert mapped[:4] == b"mine"
        place = ctypes.c_char.from_buffer(mapped)
        mprotect = ctypes.CDLL(None).mprotect
        where = ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(SIZE)
        assert mprotect(*where, mmap.PROT_READ) == 0
        give_back()
        assert mapped[:4] == b"mine"
        del place
