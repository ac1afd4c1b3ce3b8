#!/usr/bin/env python3
"""Compile launcher.c, with a table of constants from the Python modules.

usage: launchers/build_launcher.py OUTPUT [MACHINE]
       launchers/build_launcher.py --check

Without MACHINE, a C compiler of this system is used: $CC, or else musl-gcc, cc, gcc or clang. The
program is static if that can be linked. For a MACHINE (x86_64, aarch64), ziglang compiles a static
program with musl, the same bytes on every system. CFLAGS and LDFLAGS are added. --check runs gcc's
static analyser, with more warnings, each of which is an error.

A program with musl starts faster than one with glibc, which queries the processor's features: in a
virtual machine, the hypervisor traps each of these queries.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "launcher.c"
# The names that the program is installed under; the name decides what it does.
NAMES = ("gpu-py", "gpuhook-prestart", "gpuhook-cdi-hook", "gpuhook-container-cli")
MACHINES = ("x86_64", "aarch64")
FLAGS = (
    "-std=c11", "-O2", "-Wall", "-Wextra", "-fPIE", "-fstack-protector-strong",
    "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack",
)  # fmt: skip
# Compilers in the order in which they are tried, each with the options for a static program, and
# then those for a dynamic one. musl-gcc can't link a position-independent static program.
_STATIC, _DYNAMIC = "-static-pie", "-pie"
COMPILERS = {
    "musl-gcc": ("-static",),
    "cc": (_STATIC, _DYNAMIC),
    "gcc": (_STATIC, _DYNAMIC),
    "clang": (_STATIC, _DYNAMIC),
}
ANALYSER = (
    "gcc", *FLAGS, "-Wconversion", "-Wshadow", "-Wpedantic", "-Wvla", "-Wstrict-prototypes",
    "-Werror", "-fanalyzer", "-c",
)  # fmt: skip
INSTALL = (
    "Install gcc and the headers of the C library (Debian: gcc libc6-dev, Fedora: gcc "
    "glibc-devel), and try again"
)


class NoCompilerError(Exception):
    """Error if no C compiler works; the message says what to install."""


def table(changed: Mapping[str, str] | None = None) -> str:
    """Return launcher_table.h; ``changed`` replaces some of its texts."""
    sys.path.insert(0, str(HERE.parent / "src"))
    try:
        from gpuhook.base import names  # noqa: PLC0415 - this tree's, not an installed one
        from gpuhook.base.config.model import DEFAULT_PATH, Config  # noqa: PLC0415
        from gpuhook.prefork import hook_worker, instance, launcher_cache, peer_check, slots  # noqa: PLC0415
    finally:
        del sys.path[0]
    triggers = launcher_cache.words(Config()) or ()  # never empty for the defaults
    texts = {
        "DEFAULT_CONFIG": DEFAULT_PATH,
        "CACHE_FOLDER": launcher_cache.FOLDER,
        "CACHE": launcher_cache.CACHE,
        "PATH_CHARACTERS": "".join(sorted(launcher_cache.PATH_CHARACTERS)),
        "SEARCH_PATH": names.SEARCH_PATH,
        "DEFAULT_RUNTIMES": launcher_cache.runtimes(Config()),
        "ENGINES_RUNTIME": names.ENGINES_RUNTIME,
        "DEFAULT_TRIGGERS": "".join(f"{each}\n" for each in (*triggers, launcher_cache.END_MARKER)),
        "END_MARKER": launcher_cache.END_MARKER,
        "READY": instance.FOLDER,
        "SERVER_OPTION": instance.OPTION,
        "SERVER_REQUESTS": str(slots.REQUEST_PIPE),
        "SERVER_FOLDER": str(slots.FOLDER_FD),
        "SERVER_LAUNCHER": str(slots.LAUNCHER),
        **(changed or {}),
    }
    numbers = {
        "SLOT_FIRST": slots.SLOTS,
        "SLOT_COUNT": slots.SLOT_COUNT,
        "HOOK_STATE": hook_worker.STATE_FD,
        "HOOK_SLOT": peer_check.HOOK_SLOT,
    }
    lines = [f"#define {name} {_quoted(text)}" for name, text in texts.items()]
    lines += [f"#define {name} {number}" for name, number in numbers.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text of printable ASCII and newlines as a C string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def compile_with(
    command: list[str],
    output: Path,
    source: Path = SOURCE,
    changed: Mapping[str, str] | None = None,
) -> None:
    """Compile launcher.c, or a source that includes it, with a compiler and its options.

    CalledProcessError if it fails. ``changed`` as for ``table``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "launcher_table.h").write_text(table(changed), encoding="ascii")
        words = [*command, "-I", folder, "-I", str(HERE), str(source), "-o", str(output)]
        subprocess.run(words, check=True, capture_output=True, text=True)


def build(output: Path, machine: str | None = None) -> None:
    """Compile the launcher; NoCompilerError if no compiler can."""
    flags = [*FLAGS, "-s", *shlex.split(os.environ.get("CFLAGS", ""))]
    more = shlex.split(os.environ.get("LDFLAGS", ""))
    if machine is not None:
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"]
        compile_with([*zig, *flags, "-static", "-pie", "-Werror", *more], output)
        return
    failed = "No C compiler was found for gpu-py"
    for command, links in _compilers():
        for link in links:
            try:
                compile_with([*command, *flags, link, *more], output)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = str(getattr(error, "stderr", "") or error).strip().rstrip(".")
                failed = f"{command[0]} can't compile gpu-py: {reason}"
            else:
                return
    raise NoCompilerError(f"{failed}. {INSTALL}.")


def check(source: Path = SOURCE) -> None:
    """Run gcc's analyser on a source; CalledProcessError contains its findings."""
    compile_with([*ANALYSER], Path(os.devnull), source)


def _compilers() -> list[tuple[list[str], tuple[str, ...]]]:
    """Return the commands of the installed compilers, with their link options."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return [(named, COMPILERS["cc"])]
    return [([name], links) for name, links in COMPILERS.items() if shutil.which(name)]


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    known = not words[1:] or words[1:] in [[each] for each in MACHINES]
    if words != ["--check"] and (not words or words[0].startswith("-") or not known):
        sys.exit(__doc__)
    try:
        if words == ["--check"]:
            check()
        else:
            build(Path(words[0]), *words[1:])
    except NoCompilerError as error:
        sys.exit(f"build_launcher.py: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"build_launcher.py: {error.cmd[0]} reports: {error.stderr}")


if __name__ == "__main__":
    main()
