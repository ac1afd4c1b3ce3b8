"""elf: real libraries, libraries for other architectures, and files made to crash a reader."""

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import ElfError
from gpuhook.base.loader import elf

LibraryBuilder = Callable[..., bytes]
NOTE = b".note.cuda.fwd_compatibility"


def real_libraries() -> list[str]:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True)
    return sorted(
        {os.path.realpath(path) for path in re.findall(r"=> (/\S+)", listed.stdout)}
        & {str(path) for path in Path("/usr/lib").rglob("*.so*")}
    )[:150]


def read_path(path: str) -> elf.ElfLibrary:
    fd = os.open(path, os.O_RDONLY)
    try:
        return elf.read(fd, path)
    finally:
        os.close(fd)


def readelf(paths: list[str]) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """Return the SONAME and the needed libraries of each of several libraries."""
    done = subprocess.run(["readelf", "-dW", *paths], capture_output=True, text=True, check=True)
    _, *parts = re.split(r"^File: (.*)$", done.stdout, flags=re.MULTILINE)
    found = {}
    for path, text in zip(parts[::2], parts[1::2], strict=True):
        soname = re.search(r"Library soname: \[(.*)\]", text)
        needed = tuple(re.findall(r"Shared library: \[(.*)\]", text))
        found[path] = (soname and soname[1], needed)
    return found


@pytest.mark.skipif(not shutil.which("readelf"), reason="compares with binutils' readelf")
def test_real_libraries_are_read_as_by_readelf() -> None:
    paths = real_libraries()
    assert len(paths) > 20
    every = ((path, read_path(path)) for path in paths)
    assert {path: (found.soname, found.needed) for path, found in every} == readelf(paths)


def test_a_library_is_read_with_few_small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, sizes, pread = real_libraries(), list[int](), os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    for path in paths:
        read_path(path)
    assert len(sizes) / len(paths) < 16
    assert sum(sizes) / len(paths) < 8192


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [32, 64])
def test_every_elf_class_and_byte_order_is_read(
    library: LibraryBuilder, bits: int, order: str
) -> None:
    note = struct.pack(order + "III", 19, 4, 1) + b"NVIDIA Corporation\0\0{}  "
    data = library(
        "libcuda.so.1",
        ["libc.so.6", "libm.so.6"],
        bits=bits,
        machine=183,
        flags=0x400,
        order=order,
        sections={".text": b"code", NOTE.decode(): note},
    )
    found = elf.read(data)
    assert (found.bits, found.machine, found.flags) == (bits, 183, 0x400)
    assert (found.soname, found.needed) == ("libcuda.so.1", ("libc.so.6", "libm.so.6"))
    assert elf.section(data, NOTE) == note
    assert elf.note(data, NOTE, b"NVIDIA Corporation") == b"{}  "
    assert elf.note(data, NOTE, b"Somebody") is None
    assert elf.section(data, b".text") == b"code"
    assert elf.section(data, b".absent") is None


def test_a_library_without_soname_and_sections_is_read(library: LibraryBuilder) -> None:
    data = library()
    assert elf.read(data).soname is None
    assert elf.read(data).needed == ()
    assert elf.section(data, NOTE) is None


def test_the_second_note_of_a_section_is_found(library: LibraryBuilder) -> None:
    notes = b"".join(
        struct.pack("<III", len(owner), len(text), 1)
        + owner
        + bytes(-len(owner) % 4)
        + text
        + bytes(-len(text) % 4)
        for owner, text in ((b"GNU\0", b"abcde"), (b"NVIDIA Corporation\0", b'{"Format":1}'))
    )
    data = library(sections={NOTE.decode(): notes})
    assert elf.note(data, NOTE, b"NVIDIA Corporation") == b'{"Format":1}'
    short = library(sections={NOTE.decode(): notes[:-4]})
    assert elf.note(short, NOTE, b"NVIDIA Corporation") == b'{"Format'


def test_an_extended_section_count_is_read_from_the_first_header(library: LibraryBuilder) -> None:
    data = bytearray(library(sections={".a": b"1", ".b": b"2"}))
    table = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<HH", data, 60, 0, elf.SHN_XINDEX)
    struct.pack_into("<Q", data, table + 32, 4)
    struct.pack_into("<I", data, table + 40, 3)
    assert elf.section(bytes(data), b".b") == b"2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an ELF file"),
        (b"\x7fELF", "is not an ELF file"),
        (b"/* GNU ld script */ " * 10, "is not an ELF file"),
        (b"\x7fELF\x03\x01" + bytes(60), "unknown ELF class"),
        (b"\x7fELF\x02\x01" + bytes(50), "cut short"),
    ],
)
def test_a_file_that_is_no_valid_elf_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ElfError, match=message):
        elf.read(content, "/usr/lib/libx.so")


def test_a_program_is_refused_as_a_library() -> None:
    data = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<HH", data, 16, 2, 62)
    with pytest.raises(ElfError, match="is not a shared library"):
        elf.read(bytes(data))


def forge(data: bytes, offset: int, layout: str, value: int) -> bytes:
    forged = bytearray(data)
    struct.pack_into("<" + layout, forged, offset, value)
    return bytes(forged)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (32, "Q", 1 << 63, "can't be read|cut short"),
        (54, "H", 55, "impossible size"),
        (56, "H", 0xFFFF, "cut short|impossible number"),
        (64 + 56 + 32, "Q", 1 << 40, "impossible size"),
        (64 + 56 + 8, "Q", 1 << 50, "cut short"),
        (64 + 32, "Q", 1, "outside its segments"),
        (64 + 56, "I", 9, "no dynamic section"),
        (176 + 8, "Q", 1 << 33, "outside its string table"),
    ],
)
def test_forged_header_numbers_are_refused(
    library: LibraryBuilder, offset: int, layout: str, value: int, message: str
) -> None:
    with pytest.raises(ElfError, match=message):
        elf.read(forge(library("liba.so.1"), offset, layout, value))


@pytest.mark.parametrize(
    ("at", "layout", "value", "message"),
    [(32, "Q", 1 << 40, "impossible size"), (24, "Q", 1 << 40, "cut short")],
)
def test_a_forged_section_is_refused(
    library: LibraryBuilder, at: int, layout: str, value: int, message: str
) -> None:
    data = library(sections={".a": b"text"})
    table = struct.unpack_from("<Q", data, 40)[0]
    with pytest.raises(ElfError, match=message):
        elf.section(forge(data, table + 64 + at, layout, value), b".a")


def test_a_forged_section_count_is_refused(library: LibraryBuilder) -> None:
    data = forge(library(sections={".a": b""}), 60, "H", 0)
    table = struct.unpack_from("<Q", data, 40)[0]
    with pytest.raises(ElfError, match="impossible number of section headers"):
        elf.section(forge(data, table + 32, "Q", 1 << 62), b".a")


def test_a_pipe_is_refused() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(ElfError, match="can't be read at offset 0"):
            elf.read(reading, "pipe")
    finally:
        os.close(reading)
        os.close(writing)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_only_elf_errors(tail: bytes) -> None:
    for data in (tail, b"\x7fELF\x02\x01" + tail, b"\x7fELF\x01\x02" + tail):
        with suppress(ElfError):
            elf.read(data)
        with suppress(ElfError):
            elf.section(data, NOTE)


@given(st.data())
def test_mutated_libraries_raise_only_elf_errors(
    library: LibraryBuilder, data: st.DataObject
) -> None:
    bits = data.draw(st.sampled_from([32, 64]))
    note = struct.pack("<III", 4, 4, 1) + b"GNU\0text"
    content = bytearray(
        library("libcuda.so.1", ["libc.so.6"], bits=bits, sections={NOTE.decode(): note})
    )
    places = st.integers(0, len(content) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)):
        content[place] = value
    cut = bytes(content[: data.draw(st.integers(0, len(content)))])
    for each in (bytes(content), cut):
        with suppress(ElfError):
            elf.read(each)
        with suppress(ElfError):
            elf.note(each, NOTE, b"GNU")


def test_only_dynamically_linked_programs_have_a_loader() -> None:
    assert Path(elf.loader(Path("/usr/bin/env").read_bytes())).exists()
    assert not elf.loader(Path("/sbin/ldconfig").resolve().read_bytes())
    with pytest.raises(ElfError, match="script is not an ELF file"):
        elf.loader(b"#!/bin/sh\n" * 20, "script")


@pytest.mark.parametrize("tag", [elf.DT_RPATH, elf.DT_RUNPATH])
def test_rpath_and_runpath_give_the_search_path(library: LibraryBuilder, tag: int) -> None:
    """The SONAME's entry is changed to the other kind; both refer to the string table."""
    data = library("/nix/store/a/lib::/b")
    old = struct.pack("<qQ", elf.DT_SONAME, 0)[:8]
    at = data.index(old + b"", data.index(b"\x7fELF") + 64)
    changed = data[:at] + struct.pack("<q", tag) + data[at + 8 :]
    assert elf.search_path(changed) == ["/nix/store/a/lib", "/b"]
    assert elf.read(changed).soname is None
    assert elf.search_path(data) == []


def test_a_system_program_has_no_search_path() -> None:
    fd = os.open("/bin/cat", os.O_RDONLY)
    try:
        assert elf.search_path(fd) == []
    finally:
        os.close(fd)
