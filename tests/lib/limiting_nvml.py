"""A library named like NVML's with limits as a test defines them, and a limiter that uses it."""

import shutil
import subprocess
from pathlib import Path

from machines import gpu, machine

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory.model import DriverFile
from gpuhook.core.request.reader import Request
from gpuhook.vendors.nvidia import nvml_limiter
from gpuhook.vendors.nvidia.nvml_limiter import NvmlLimiter
from gpuhook.vendors.nvidia.vendor import VENDOR

GIB = 1 << 30
FOLDER = "/sys/fs/cgroup/engine/container"

LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long u64;
struct set { const char *path; u64 soft, hard; };
struct get { const char *path; u64 soft, hard, used; };
static u64 hard = ~0ULL;
int nvmlInit_v2(void) { INIT; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    *handle = (void *)0x7f1234567890;
    return strncmp(uuid, "GPU-", 4) ? 6 : 0;
}
#ifndef OLD
int nvmlDeviceSetMemoryLimits_v1(void *handle, struct set *it)
{
    if (handle != (void *)0x7f1234567890 || strcmp(it->path, PATH) || it->soft || geteuid())
        return 2;
    SET;
    return 0;
}
int nvmlDeviceGetMemoryLimits_v1(void *handle, struct get *it)
{
    if (handle != (void *)0x7f1234567890 || strcmp(it->path, PATH))
        return 2;
    it->hard = hard;
    it->used = 1ULL << 33;
    GET;
    return 0;
}
#endif
"""
TAKES = "hard = it->hard"


def limiter(
    folder: Path, set_: str = TAKES, get: str = "", init: str = "", *more: str, wait: float = 10
) -> NvmlLimiter:
    """Build a library with this C code in its calls; return a limiter that uses it."""
    path = folder / "libnvidia-ml.so.1"
    values = {"SET": set_, "GET": get, "INIT": init, "PATH": f'"{FOLDER}"'}
    words = [f"-D{name}={value}" for name, value in values.items()]
    gcc = shutil.which("gcc") or "gcc"
    command = [gcc, "-shared", "-fPIC", "-w", *words, *more, "-o", str(path), "-xc", "-"]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    file = DriverFile("library", str(path), path.name, "utility", nvml_limiter.LIBRARY)
    inventory = machine(gpu(0, 3).but(memory=80 * GIB)).but(version="615.1", files=(file,))
    grant = contract.Grant(VENDOR, Request("nvidia"), inventory, inventory.devices)
    config = Config()
    config.nvml_timeout = wait
    return NvmlLimiter(grant, config)
