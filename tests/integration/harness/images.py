"""Root filesystems for containers, made from this host's Debian packages."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuhook_simulate.vendors.nvidia import build_cuda_probe
from harness.commands import run

REPOSITORY = Path(__file__).parents[3]
PROBES = Path(__file__).parent / "probes"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CUDA_PROBE = "gpuhook-cuda-probe"
_GCC = ("gcc", "-x", "c", "-O1", "-Wall", "-Werror")
KINDS = ("busybox", "debian", "lib64")


def build(folder: Path, probes: dict[str, Path]) -> dict[str, Path]:
    """Build every kind of root below ``folder``, with the ``probes`` in /usr/local/bin.

    ``probes`` maps a program's name to the program.
    """
    folder.mkdir()
    roots = {}
    for kind in KINDS:
        roots[kind] = folder / kind
        run([REPOSITORY / "scripts/lib/rootfs", kind, roots[kind]]).ok()
        for name, program in probes.items():
            shutil.copy(program, roots[kind] / "usr/local/bin" / name)
    return roots


def compile_probes(folder: Path) -> dict[str, Path]:
    """Compile the probe programs into ``folder``; a static one runs in any root."""
    folder.mkdir()
    flags = {name: ["-static"] for name in ("devopen", "ownmount", "owncgroup")} | {"dlprobe": []}
    programs = {name: folder / name for name in flags}
    for name, extra in flags.items():
        source = (PROBES / f"{name}.c").read_bytes()  # for tests/lib/compiler, by standard input
        run([*_GCC, *extra, "-o", programs[name], "-"], stdin=source).ok()
    programs[CUDA_PROBE] = Path(build_cuda_probe(str(folder / CUDA_PROBE)))
    return programs


def save(
    roots: dict[str, Path],
    archive: Path,
    command: Sequence[str] = ("sh",),
    env: Sequence[str] = (),
) -> Path:
    """Write ``roots`` into ``archive`` as docker save would, because all engines can load this.

    The root called debian becomes the image localhost/debian:test. ``command`` is the default
    command of a container. ``env`` has the variables that the images set in addition to PATH.
    """
    manifest = []
    with tarfile.open(archive, "w") as tar:
        for kind, root in roots.items():
            layer = archive.with_name(f"{kind}.layer")
            run(["tar", "-C", root, "-cf", layer, "."]).ok()
            tar.add(layer, f"{kind}/layer.tar")
            _add(tar, f"{kind}.json", _image_config(layer, command, env))
            layer.unlink()
            manifest.append(
                {
                    "Config": f"{kind}.json",
                    "RepoTags": [image(kind)],
                    "Layers": [f"{kind}/layer.tar"],
                }
            )
        _add(tar, "manifest.json", manifest)
    return archive


def image(kind: str) -> str:
    """Return the name of the image that was made from this kind of root."""
    return f"localhost/{kind}:test"


def _image_config(layer: Path, command: Sequence[str], env: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    return {
        "architecture": run(["dpkg", "--print-architecture"]).ok().stdout.strip(),
        "os": "linux",
        "config": {"Env": [f"PATH={PATH}", *env], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "the tests"}],
    }


def _add(tar: tarfile.TarFile, name: str, value: object) -> None:
    content = json.dumps(value).encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
