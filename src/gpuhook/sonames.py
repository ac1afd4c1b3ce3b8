"""What ldconfig makes of a folder of libraries: ABI flags, SONAME links, cache entries.

Sources: ldconfig(8), glibc's elf/ldconfig.c and sysdeps/*/readelflib.c for the rules, the
dl-cache.h of each architecture for the flags.

Hot path: imports elf and ldcache.
"""

import os

from gpuhook import elf
from gpuhook.ldcache import order_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

FLAG_LIBC6 = 0x0003

# The second byte of an entry's flags, by width and machine.
ARCHES = {
    (32, elf.EM_386): 0x0000,
    (32, elf.EM_PPC): 0x0000,
    (32, elf.EM_ARM): 0x0000,
    (64, elf.EM_X86_64): 0x0300,
    (64, elf.EM_PPC64): 0x0500,
    (32, elf.EM_X86_64): 0x0800,
    (64, elf.EM_AARCH64): 0x0A00,
}
ARM_FLOAT = {0x400: 0x0900, 0x200: 0x0B00}
RISCV_FLOAT = {0x0: 0x0F00, 0x4: 0x1000}
EF_ARM_ABI_FLOAT = 0x600
EF_RISCV_FLOAT_ABI = 0x6


def flags_for(bits: int, machine: int, e_flags: int = 0) -> int | None:
    """Return the flags of a cache entry for an ELF library, None for a machine without one.

    The numbers are ``elf.Library``'s; ``e_flags`` matters to ARM and RISC-V, whose loaders
    keep floating-point ABIs apart.
    """
    arch = ARCHES.get((bits, machine))
    if machine == elf.EM_ARM:
        arch = ARM_FLOAT.get(e_flags & EF_ARM_ABI_FLOAT, arch)
    elif machine == elf.EM_RISCV and bits == 64:
        arch = RISCV_FLOAT.get(e_flags & EF_RISCV_FLOAT_ABI)
    return None if arch is None else arch | FLAG_LIBC6


def is_library_name(name: str) -> bool:
    """Whether ldconfig looks at a file of that name: lib*.so* or ld-*.so*."""
    return name.startswith(("lib", "ld-")) and ".so" in name and "/" not in name


def winners(libraries: "Iterable[tuple[str, str | None]]") -> dict[str, str]:
    """Return which file each SONAME stands for in one folder, SONAMEs sorted.

    ``libraries`` are file names with their SONAMEs, of one ABI. Of the files with the same
    SONAME the highest version wins (numbers compare as numbers). A file without a SONAME
    stands for its own name. SONAMEs that are no plain file names are left out.
    """
    chosen: dict[str, str] = {}
    for name, soname in libraries:
        key = soname or name
        if not is_library_name(name) or "/" in key or key in {".", ".."}:
            continue
        rival = chosen.get(key)
        if rival is None or _order(rival) < _order(name):
            chosen[key] = name
    return dict(sorted(chosen.items()))


def links(libraries: "Iterable[tuple[str, str | None]]") -> dict[str, str]:
    """Return the SONAME links that ldconfig makes in one folder: link name to file name.

    ``libraries`` as for ``winners``. No link takes the name of one of the files.
    """
    given = list(libraries)
    names = {name for name, _soname in given}
    return {link: name for link, name in winners(given).items() if link not in names}


def cache_entries(
    folder: str,
    libraries: "Iterable[tuple[str, str | None]]",
    flags: int,
    development_links: "Iterable[str]" = (),
) -> list[tuple[str, str, int]]:
    """Return what ldconfig writes into the cache for one folder, for ``ldcache.merge``.

    ``libraries`` as for ``winners``, ``flags`` their common ABI. ``development_links`` are
    further links in the folder; ldconfig enters those that end in .so and begin a SONAME
    (libcuda.so, for libcuda.so.1) and no others.
    """
    sonames = list(winners(libraries))
    for link in development_links:
        if link.endswith(".so") and any(name.startswith(link) for name in sonames):
            sonames.append(link)
    return [(name, f"{folder}/{name}", flags) for name in dict.fromkeys(sonames)]


def _order(name: str) -> "tuple[bytes | int, ...]":
    return order_key(os.fsencode(name))
