"""What ldconfig makes of a folder of libraries: SONAME links and cache entries.

Sources: ldconfig(8), glibc's elf/ldconfig.c for the rules.

Hot path: imports ldcache.
"""

import os

from gpuhook.ldcache import order_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


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
