#!/usr/bin/env python3
"""Print the bill of materials of a release: the third-party libraries in its files.

usage: sbom.py VERSION FILE...

The output is a CycloneDX document in JSON, the same for the same files. Sdists and the
additions to gpuhook contain no third-party libraries. Every other file contains the launcher,
into which ziglang has linked the C library musl. The packages also contain pynvml. Both
ziglang and pynvml are those of the environment that this script runs in. An image contains a
Python with its libraries, whose Debian packages are listed in it, and the wheels that pip has
installed. Source: the CycloneDX specification 1.6 and the package URL specification.
"""

import datetime as dt
import email.message
import email.parser
import hashlib
import json
import os
import re
import sys
import tarfile
import uuid
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast
from urllib.parse import quote

_PACKED_IN = "nvidia-ml-py"
_COMPILER = "ziglang"
_DEBIAN_PACKAGES = "usr/lib/gpuhook-node/debian-packages"
_LONGEST = 60  # characters of a licence's name; longer text is the licence itself


def main() -> None:
    """Print the document."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    version, *paths = sys.argv[1:]
    files = [file_component(path) for path in paths]
    time = dt.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), dt.UTC)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(files))}",
        "version": 1,
        "metadata": {
            "timestamp": time.isoformat(),
            "component": {
                "type": "application",
                "name": "gpuhook",
                "version": version,
                "purl": f"pkg:pypi/gpuhook@{version}",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": files,
    }
    print(json.dumps(document, indent=2))  # noqa: T201 - what it is for


def file_component(path: str) -> dict[str, Any]:
    """Return the entry of one release file, with the libraries that it contains."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    is_image = path.endswith(".tar")
    found: list[dict[str, Any]] = []
    if is_image:
        found = sorted(in_image(path), key=lambda each: str(each["purl"]))
    elif is_gpuhooks(path) and path.endswith((".deb", ".rpm")):
        found = [of_environment(_PACKED_IN)]
    if is_image or (is_gpuhooks(path) and not path.endswith(".gz")):
        about = {"description": "Its C library, musl, is linked into the launcher"}
        found.append(of_environment(_COMPILER) | about)
    entry = {
        "type": "container" if is_image else "file",
        "name": os.path.basename(path),
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    return {**entry, "components": found} if found else entry


def is_gpuhooks(path: str) -> bool:
    """Return whether a file belongs to gpuhook itself and not to one of its additions."""
    return re.match(r"gpuhook[-_]\d", os.path.basename(path)) is not None


def of_environment(name: str) -> dict[str, Any]:
    """Return the entry of a library that is installed in this environment."""
    return library(cast("email.message.Message", metadata.metadata(name)))


def library(about: email.message.Message) -> dict[str, Any]:
    """Return the entry of a library, from the METADATA of its wheel."""
    name, version = str(about["Name"]), str(about["Version"])
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
    entry = {"type": "library", "name": name, "version": version, "purl": purl}
    if expression := about["License-Expression"]:
        return {**entry, "licenses": [{"expression": expression}]}
    named = str(about["License"] or "")
    if 0 < len(named) <= _LONGEST and "\n" not in named:
        return {**entry, "licenses": [{"license": {"name": named}}]}
    return entry


def debian_package(line: str) -> dict[str, Any]:
    """Return the entry of a Debian package, from a line with name, version and architecture."""
    name, version, architecture = line.split()
    purl = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "name": name, "version": version, "purl": purl}


def in_image(path: str) -> Iterator[dict[str, Any]]:
    """Yield the libraries that an image's files list; ``path`` is an OCI archive."""
    with tarfile.open(path) as archive:
        [described] = _json(archive, "index.json")["manifests"]
        [layer] = _json(archive, _blob(described))["layers"]
        with tarfile.open(fileobj=archive.extractfile(_blob(layer)), mode="r:gz") as files:
            for member in files:
                if member.name.endswith(".dist-info/METADATA"):
                    about = email.parser.BytesParser().parsebytes(_content(files, member))
                    if about["Name"] != "gpuhook":
                        yield library(about)
                elif member.name == _DEBIAN_PACKAGES:
                    lines = _content(files, member).decode().splitlines()
                    yield from (debian_package(line) for line in lines)


def _blob(descriptor: dict[str, Any]) -> str:
    return f"blobs/{descriptor['digest'].replace(':', '/')}"


def _json(archive: tarfile.TarFile, name: str) -> Any:
    return json.loads(_content(archive, archive.getmember(name)))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is no file")
    return file.read()


if __name__ == "__main__":
    main()
