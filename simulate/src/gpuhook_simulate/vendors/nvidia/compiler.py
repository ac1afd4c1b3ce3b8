"""Compilation of the simulated libraries and programs with the host's C compiler."""

import concurrent.futures
import errno
import os
import shutil
import subprocess
from dataclasses import dataclass, field

from gpuhook.base.errors import SimulateError

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "c")

_FLAGS = (
    "-std=gnu11",
    "-O0",  # builds should be fast, and the results do next to nothing
    "-pipe",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-fno-ident",
    "-Wl,--build-id=none",
    "-Wl,-z,relro,-z,now",
    "-Wl,--no-as-needed",
)
# With glibc 2.38 and later, strtol is by default a function that images of older releases lack.
# 32-bit builds have no C library.
_PREAMBLE = """\
#ifdef __LP64__
#define _GNU_SOURCE
#include <features.h>
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#endif
"""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One file to compile and link: the names of its sources, and the compiler's flags.

    The sources become one translation unit, because the compiler's start and the headers take most
    of the time. So their static names share one scope.
    """

    output: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = field(default=())


def shared(output: str, soname: str, *sources: str, flags: tuple[str, ...] = ()) -> CompileJob:
    """Return the job that links a shared library with that DT_SONAME."""
    return CompileJob(output, sources, ("-shared", "-fPIC", f"-Wl,-soname,{soname}", *flags))


def program(output: str, *sources: str) -> CompileJob:
    """Return the job that links a program only against libc."""
    return CompileJob(output, sources, ("-fPIE", "-pie", "-ldl"))


def compile_all(jobs: list[CompileJob], include: str) -> None:
    """Run the jobs in parallel; ``include`` is the folder with the generated header.

    Raises SimulateError if there is no compiler or it rejects a source, OSError if there is no
    room.
    """
    compiler = find_compiler()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for running in [pool.submit(_compile, compiler, job, include) for job in jobs]:
            running.result()


def find_compiler() -> str:
    """Return the path of gcc; SimulateError if there is none."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise SimulateError(
            "There is no C compiler on this host, and the simulated driver is written in C",
            "Install gcc and the C library's headers (apt-get install gcc libc6-dev)",
        )
    return compiler


def _compile(compiler: str, job: CompileJob, include: str) -> None:
    unit = _PREAMBLE + "".join(f'#include "{name}"\n' for name in job.sources)
    arguments = [
        compiler,
        *_FLAGS,
        f"-I{include}",
        f"-I{SOURCES}",
        "-o",
        job.output,
        "-xc",
        "-",
        "-xnone",
        *job.flags,
    ]
    done = subprocess.run(
        arguments, input=unit, capture_output=True, text=True, check=False,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode == 0:
        return
    full = os.strerror(errno.ENOSPC)
    if full in done.stderr:
        raise OSError(errno.ENOSPC, full, job.output)
    first = next((line for line in done.stderr.split("\n") if "error" in line), done.stderr)
    raise SimulateError(
        f"The C compiler can't build {os.path.basename(job.output)} ({first.strip()})",
        "Check that gcc works and that the C library's headers are installed (libc6-dev)",
    )
