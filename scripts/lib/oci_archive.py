#!/usr/bin/env python3
"""Write a root filesystem as an image into an OCI archive, as podman and containerd load it.

usage: oci_archive.py ROOT NAME:TAG ARCHITECTURE PROGRAM OUTPUT

The same files give the same archive, byte for byte: names are in order, owners are root and
times are SOURCE_DATE_EPOCH. A container runs PROGRAM if no other program is requested. Source:
the image specification of the Open Container Initiative, image-layout.md, manifest.md and
config.md.
"""

import datetime as dt
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from typing import Any

_TYPE = "application/vnd.oci.image"
_PATH = "/usr/bin"


def layer(root: str, time: int) -> bytes:
    """Return a tar archive of everything below ``root``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted([*folders, *files]):
                path = os.path.join(folder, name)
                member = tar.gettarinfo(path, os.path.relpath(path, root))
                member.mtime = min(int(member.mtime), time)
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                if member.isreg():
                    with open(path, "rb") as file:
                        tar.addfile(member, file)
                else:
                    tar.addfile(member)
    return stream.getvalue()


class Archive:
    """An OCI image layout that is being written into a tar file."""

    def __init__(self, output: str, time: int) -> None:
        self._tar = tarfile.open(output, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115 - see close
        self._time = time

    def add(self, name: str, data: bytes) -> None:
        """Add a file."""
        member = tarfile.TarInfo(name)
        member.size, member.mtime = len(data), self._time
        self._tar.addfile(member, io.BytesIO(data))

    def blob(self, kind: str, data: bytes) -> dict[str, Any]:
        """Add a blob; return its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        self.add(f"blobs/sha256/{digest}", data)
        return {"mediaType": f"{_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def close(self) -> None:
        """Finish the file."""
        self._tar.close()


def write(root: str, name: str, architecture: str, program: str, output: str) -> None:
    """Write the archive."""
    time = int(os.environ["SOURCE_DATE_EPOCH"])
    files = layer(root, time)
    created = dt.datetime.fromtimestamp(time, dt.UTC).isoformat()
    config = {
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": [f"PATH={_PATH}"], "Entrypoint": [program]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(files).hexdigest()}"]},
        "history": [{"created": created, "created_by": "scripts/build-image"}],
    }
    archive = Archive(output, time)
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
        "config": archive.blob("config.v1+json", json.dumps(config).encode()),
        "layers": [archive.blob("layer.v1.tar+gzip", gzip.compress(files, mtime=0))],
    }
    described = archive.blob("manifest.v1+json", json.dumps(manifest).encode())
    # podman reads the name from the first annotation, containerd from the second.
    described["annotations"] = {
        "org.opencontainers.image.ref.name": name,
        "io.containerd.image.name": name,
    }
    index = {"schemaVersion": 2, "manifests": [described]}
    archive.add("index.json", json.dumps(index).encode())
    archive.add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    archive.close()


if __name__ == "__main__":
    write(*sys.argv[1:])
