"""Library links and the loader's folders, compared with the hooks of NVIDIA's CDI specs.

The one hook of gpuhook's CDI specs does what NVIDIA's hooks do by arguments.
"""

import os
from typing import Any

import own
import pytest

from gpuhook.base.loader import layout
from gpuhook.core.cdi import hook
from gpuhook.core.inventory.model import DriverFile
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import Symlink, UpdateLdCache, WriteFile
from gpuhook.vendors.nvidia import edits

Case = dict[str, Any]
IMAGE = Image(layout.debian(own.MACHINE))


def library(path: str, soname: str | None = None, host: str = "") -> DriverFile:
    return DriverFile("library", host or path, path, "compute", soname)


def written(ops: list[Symlink]) -> list[str]:
    """Return links as NVIDIA's hook has them on its command line."""
    return [f"{op.target}::{op.destination}" for op in ops]


def for_loader(paths: list[str]) -> dict[str, WriteFile]:
    """Return the files that list library folders for an image's loader."""
    entries = tuple((os.path.basename(path), path, 0) for path in paths)
    ops = [*hook._for_loader(entries, UpdateLdCache(entries, ""), IMAGE)] if entries else []
    return {op.destination: op for op in ops if isinstance(op, WriteFile)}


@pytest.mark.vectors("hook_creator", "hook_creator.driver_links")
def test_driver_library_links_match_the_vectors(case: Case) -> None:
    path = case["input"]["mount"]
    folder, name = os.path.split(path)
    sonames = [
        f"{name.partition('.so.')[0]}.so.1",
        name,
    ]  # a SONAME as in the driver, or the file's name if there is no SONAME
    soname = sonames["GLX" in name]
    every = edits._links([(library(path, soname), folder)])
    found = [
        each for each in written([*every]) if not each.startswith(f"{name}::{folder}/{soname}")
    ]
    assert found == (case["expected"]["links"] or [])


# Links that the rule of ``driver_links`` adds, whatever files the host has.
ALWAYS = {"host .so link missing": ["libcuda.so.1::/usr/lib/libcuda.so"]}


@pytest.mark.vectors("hook_creator", "hook_creator.soname_links")
def test_soname_links_match_the_vectors(case: Case) -> None:
    given = case["input"]
    made = library(given["container_path"], given["soname"] or None, given["host_path"])
    every = edits._links([(made, os.path.dirname(given["container_path"]))])
    expected = [*case["expected"]["links"], *ALWAYS.get(case["name"], ())]
    assert written([*every]) == expected


@pytest.mark.vectors("hook_creator", "hook_creator.ldcache_from_mounts")
def test_loader_folders_of_mounted_libraries_match_the_vectors(case: Case) -> None:
    files = [
        DriverFile("binary" if "/bin/" in path else "library", path, path, "compute", None)
        for path in case["input"]["mounts"]
    ]
    libraries = [(file, folder) for file in files if (folder := edits._folder(file, IMAGE.layout))]
    entries = edits._ld_cache(libraries, None, "").libraries
    made = for_loader([path for _, path, _ in entries]).get(hook.FOLDERS_CONFIG)
    folders = made.content.split() if made else []
    words = [word for folder in folders for word in ("--folder", folder)]
    assert words == (case["expected"].get("args") or [])[2:]


@pytest.mark.vectors("ldconfig", "ldconfig.dropin")
def test_the_loader_drop_in_file_matches_the_vectors(case: Case) -> None:
    made = for_loader([f"{folder}/libx.so.1" for folder in case["input"]["dirs"]])
    expected = case["expected"]
    if expected["file_contents"] is None:
        assert made == {}
    else:
        [file] = made.values()
        assert file.content == expected["file_contents"]
        assert file.mode == int(expected["mode"], 8)
