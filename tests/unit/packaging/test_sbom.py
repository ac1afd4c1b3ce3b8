"""The bill of materials of a release, which lists the parts of other projects in its files."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts/lib"
LIBRARIES = {
    "click": "Name: click\nVersion: 8.1.3\nLicense-Expression: BSD-3-Clause\n",
    "pyroute2": "Name: PyRoute2\nVersion: 0.7.2\nLicense: dual license GPLv2+ and Apache v2\n",
    "long": f"Name: long_one\nVersion: 1\nLicense: {'a whole text ' * 20}\n",
    "gpuhook": "Name: gpuhook\nVersion: 1.2.3\n",
}
DEBIAN = "libc6 2.36-9+deb12u14 amd64\nzlib1g 1:1.2.13.dfsg-1 amd64\n"


COMPILER = "Metadata-Version: 2.1\nName: ziglang\nVersion: 0.99\nLicense-Expression: MIT\n"


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release environment that contains the compiler."""
    (tmp_path / "environment/ziglang-0.99.dist-info").mkdir(parents=True)
    (tmp_path / "environment/ziglang-0.99.dist-info/METADATA").write_text(COMPILER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "environment"))


def call(script: str, *words: str | Path) -> str:
    env = os.environ | {"SOURCE_DATE_EPOCH": "86400"}
    argv = [sys.executable, SCRIPTS / script, *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image with libraries, in the layout of scripts/build-image."""
    node = tmp_path / "root/usr/lib/gpuhook-node"
    for name, text in LIBRARIES.items():
        folder = node / f"lib/gpuhook/{name}-1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"{text}\nThe description.\nName: another\n")
    (node / "debian-packages").write_text(DEBIAN)
    path = tmp_path / "gpuhook-image.tar"
    call(
        "oci_archive.py",
        tmp_path / "root",
        "localhost/gpuhook:1",
        "amd64",
        "/usr/bin/gpuhook",
        path,
    )
    return path


def bill(*paths: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("sbom.py", "1.2.3", *paths))
    return found


def test_the_sbom_lists_an_images_libraries_and_packages(image: Path) -> None:
    document = bill(image)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["timestamp"] == "1970-01-02T00:00:00+00:00"
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/gpuhook@1.2.3"
    [entry] = document["components"]
    assert (entry["type"], entry["name"]) == ("container", "gpuhook-image.tar")
    assert entry["hashes"][0]["content"] == hashlib.sha256(image.read_bytes()).hexdigest()
    licences = {each["purl"]: each.get("licenses") for each in entry["components"]}
    assert licences == {
        "pkg:pypi/click@8.1.3": [{"expression": "BSD-3-Clause"}],
        "pkg:pypi/pyroute2@0.7.2": [{"license": {"name": "dual license GPLv2+ and Apache v2"}}],
        "pkg:pypi/long-one@1": None,
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64": None,
        "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=amd64": None,
        "pkg:pypi/ziglang@0.99": [{"expression": "MIT"}],
    }


def test_the_sbom_lists_pynvml_in_the_debian_package(tmp_path: Path) -> None:
    package, wheel = tmp_path / "gpuhook_1.deb", tmp_path / "gpuhook-1.whl"
    additions = [
        tmp_path / f"gpuhook-{name}" for name in ("simulate_1.deb", "hpc_1.deb", "hpc-1.rpm")
    ]
    for path in (package, *additions, wheel):
        path.write_bytes(b"")
    of_package, *of_additions, of_wheel = bill(package, *additions, wheel)["components"]
    assert not any("components" in each for each in of_additions)
    assert [each["name"] for each in of_package["components"]] == ["nvidia-ml-py", "ziglang"]
    [launchers] = of_wheel["components"]
    assert launchers["description"] == "Its C library, musl, is linked into the launcher"


def test_the_same_files_yield_the_same_sbom(image: Path) -> None:
    first = bill(image)
    assert bill(image) == first
    with tarfile.open(image, "a") as archive:
        archive.addfile(tarfile.TarInfo("more"), io.BytesIO())
    assert bill(image)["serialNumber"] != first["serialNumber"]


def test_sbom_without_files_prints_its_usage() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "sbom.py", "1"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"usage:" in done.stderr
