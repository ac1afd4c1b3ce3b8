"""ELF reader for shared libraries: class, machine, SONAME, NEEDED, notes.

Source: the ELF gABI (System V ABI, chapters 4 and 5) and elf.h. It reads with
``os.pread`` at checked offsets, so a library of a hundred megabytes costs a few small reads.
Forged counts and sizes can't make it read more than the limits below.
"""

import os
import struct

from gpuhook.base.errors import ElfError
from gpuhook.base.oci.jsontext import Record

# File identification and type.
MAGIC = b"\x7fELF"
CLASS32, CLASS64 = 1, 2
LITTLE_ENDIAN, BIG_ENDIAN = 1, 2
ET_DYN = 3

# Segment types, dynamic tags, section types and the section number that means "look elsewhere".
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_SONAME = 0, 1, 5, 10, 14
DT_RPATH, DT_RUNPATH = 15, 29
SHT_NOBITS = 8
SHN_XINDEX = 0xFFFF

# Limits that no real library reaches, so that a forged count can't cost time or memory.
MAX_SECTIONS_SIZE = 4 << 20
MAX_SEGMENTS_SIZE = 1 << 16  # a thousand; real libraries have a dozen
MAX_DYNAMIC_SIZE = 1 << 16
MAX_SECTION_SIZE = 1 << 20
MAX_STRING = 4096
MAX_NEEDED = 1024

HEADER_SIZE = 64
STRING_CHUNK = 128


class ElfLibrary(Record):
    """Properties of a shared library.

    ``bits`` is 32 or 64, ``machine`` and ``flags`` are e_machine and e_flags, ``soname`` is None
    if the library has none, ``needed`` keeps the file's order.
    """

    bits: int
    machine: int
    flags: int
    soname: str | None
    needed: tuple[str, ...]


def read(source: int | bytes, path: str = "library") -> ElfLibrary:
    """Return the properties of the shared library in ``source``, a descriptor or bytes.

    ``path`` is only for messages. Raises ElfError for anything that is not a well-formed
    shared library, OSError never.
    """
    elf = _Elf(source, path)
    if elf.type != ET_DYN:
        raise elf.error("is not a shared library")
    soname, needed = elf.dynamic_names()
    return ElfLibrary(elf.bits, elf.machine, elf.flags, soname, needed)


def section(source: int | bytes, name: bytes, path: str = "library") -> bytes | None:
    """Return the content of the section named ``name``, None if there is no such section.

    For notes such as b".note.cuda.fwd_compatibility". Raises ElfError as ``read`` does, and
    for a section of more than 1 MiB.
    """
    return _Elf(source, path).section(name)


def note(source: int | bytes, name: bytes, owner: bytes, path: str = "library") -> bytes | None:
    """Return the description of the first note by ``owner`` in the section named ``name``.

    None if the section or such a note is missing. A description that is cut short is returned as
    far as it goes. Raises ElfError as ``section`` does.
    """
    elf = _Elf(source, path)
    content = elf.section(name)
    if content is None:
        return None
    at = 0
    while at + 12 <= len(content):
        name_size, size, _type = struct.unpack_from(elf.order + "III", content, at)
        start = at + 12 + (name_size + 3 & ~3)
        end = start + size
        if content[at + 12 : at + 12 + name_size].rstrip(b"\0") == owner:
            return content[start:end]
        at = end + 3 & ~3
    return None


def loader(source: int | bytes, path: str = "program") -> str:
    """Return the path of a program's dynamic loader, "" if the program is static.

    ``path`` is only for messages. Raises ElfError for anything that is not a well-formed ELF file.
    """
    elf = _Elf(source, path)
    for kind, offset, _address, size in elf.segments():
        if kind == PT_INTERP:
            return os.fsdecode(elf.read(offset, min(size, MAX_STRING)).partition(b"\0")[0])
    return ""


def machine(source: int | bytes, path: str = "program") -> int:
    """Return the e_machine of an ELF file; ElfError as in ``loader``."""
    number: int = _Elf(source, path).machine
    return number


def search_path(source: int | bytes, path: str = "program") -> list[str]:
    """Return the folders that a program searches first for libraries.

    ``path`` is only for messages. Raises ElfError for anything that is not a well-formed ELF file.
    """
    texts = _Elf(source, path).dynamic_texts(DT_RPATH, DT_RUNPATH)
    return [folder for text in texts for folder in text.split(":") if folder]


class _Elf:
    """The header of one ELF file, and checked reads from the rest of it."""

    __slots__ = (
        "_source",
        "bits",
        "flags",
        "machine",
        "order",
        "path",
        "program_headers",
        "section_headers",
        "type",
    )

    def __init__(self, source: int | bytes, path: str) -> None:
        self._source = source
        self.path = path
        head = self.read(0, HEADER_SIZE, exact=False)
        if head[:4] != MAGIC or len(head) < 52:
            raise self.error("is not an ELF file")
        if head[4] not in (CLASS32, CLASS64) or head[5] not in (LITTLE_ENDIAN, BIG_ENDIAN):
            raise self.error("has an unknown ELF class or byte order")
        self.bits = 64 if head[4] == CLASS64 else 32
        self.order = "<" if head[5] == LITTLE_ENDIAN else ">"
        layout = "HHIQQQIHHHHHH" if self.bits == 64 else "HHIIIIIHHHHHH"
        if len(head) < 16 + struct.calcsize("=" + layout):
            raise self.error("is cut short inside its ELF header")
        fields = struct.unpack_from(self.order + layout, head, 16)
        self.type, self.machine = fields[0], fields[1]
        self.flags = fields[6]
        self.program_headers = (fields[4], fields[8], fields[9])
        self.section_headers = (fields[5], fields[10], fields[11], fields[12])

    def error(self, what: str) -> ElfError:
        """Return the error that says ``what`` about this file."""
        return ElfError(
            f"{self.path} {what}",
            "Reinstall the package that the file belongs to, or remove the file",
        )

    def read(self, offset: int, size: int, *, exact: bool = True) -> bytes:
        """Return ``size`` bytes at ``offset``; fewer, at the end of the file, unless ``exact``."""
        source = self._source
        if isinstance(source, bytes):
            data = source[offset : offset + size]
        else:
            try:
                data = os.pread(source, size, offset)
            except (OSError, OverflowError) as error:
                raise self.error(f"can't be read at offset {offset}: {error}") from error
        if exact and len(data) != size:
            raise self.error(f"is cut short: {size} bytes expected at offset {offset}")
        return data

    def _headers(self, what: str, offset: int, size: int, count: int, layout: str) -> bytes:
        most = MAX_SEGMENTS_SIZE if what == "program" else MAX_SECTIONS_SIZE
        if size != struct.calcsize(layout):
            raise self.error(f"has {what} headers of an impossible size ({size})")
        if size * count > most:  # protects: elf-headers
            raise self.error(f"has an impossible number of {what} headers ({count})")
        return self.read(offset, size * count)

    def segments(self) -> list[tuple[int, int, int, int]]:
        """Return type, file offset, virtual address and size in the file of each segment."""
        offset, size, count = self.program_headers
        if not count:
            return []
        layout = self.order + ("IIQQQQQQ" if self.bits == 64 else "IIIIIIII")
        data = self._headers("program", offset, size, count, layout)
        if self.bits == 64:
            return [(p[0], p[2], p[3], p[5]) for p in struct.iter_unpack(layout, data)]
        return [(p[0], p[1], p[2], p[4]) for p in struct.iter_unpack(layout, data)]

    def dynamic_names(self) -> tuple[str | None, tuple[str, ...]]:
        """Return DT_SONAME and the list of DT_NEEDED."""
        soname = self.dynamic_texts(DT_SONAME)
        return soname[-1] if soname else None, tuple(self.dynamic_texts(DT_NEEDED))

    def dynamic_texts(self, *tags: int) -> list[str]:
        """Return the strings of entries of the dynamic section, in the file's order."""
        segments = self.segments()
        strings, size = None, 0
        found: list[int] = []
        for tag, value in self._dynamic(segments):
            if tag in tags:
                found.append(value)
            elif tag == DT_STRTAB:
                strings = value
            elif tag == DT_STRSZ:
                size = value
        if not found:
            return []
        if strings is None:
            raise self.error("has a dynamic section without a string table")
        if len(found) > MAX_NEEDED:
            raise self.error(f"needs an impossible number of libraries ({len(found)})")
        table = self._file_offset(segments, strings)
        return [self._string(table, size, value) for value in found]

    def _dynamic(self, segments: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
        where = next((s for s in segments if s[0] == PT_DYNAMIC), None)
        if where is None:
            raise self.error("has no dynamic section")
        _kind, offset, _address, size = where
        layout = self.order + ("qQ" if self.bits == 64 else "iI")
        if size > MAX_DYNAMIC_SIZE:  # protects: elf-dynamic
            raise self.error(f"has a dynamic section of an impossible size ({size})")
        data = self.read(offset, size - size % struct.calcsize(layout))
        entries = []
        for entry in struct.iter_unpack(layout, data):
            if entry[0] == DT_NULL:
                break
            entries.append((entry[0], entry[1]))
        return entries

    def _file_offset(self, segments: list[tuple[int, int, int, int]], address: int) -> int:
        for kind, offset, start, size in segments:
            if kind == PT_LOAD and start <= address < start + size:
                return offset + address - start
        raise self.error(f"has a string table outside its segments (at {address:#x})")

    def _string(self, table: int, size: int, index: int) -> str:
        if index >= size:
            raise self.error("has a name outside its string table")
        for chunk in (STRING_CHUNK, MAX_STRING):
            data = self.read(table + index, min(chunk, size - index), exact=False)
            end = data.find(b"\0")
            if end >= 0:
                return os.fsdecode(data[:end])
        raise self.error("has a name without an end")

    def section(self, name: bytes) -> bytes | None:
        """Return the content of the section named ``name``, None if there is none."""
        offset, size, count, names_index = self.section_headers
        if not offset:
            return None
        wide = self.bits == 64
        layout = self.order + ("IIQQQQIIQQ" if wide else "IIIIIIIIII")
        if count == 0 or names_index == SHN_XINDEX:
            # gABI: values that don't fit into the header are in the first section header.
            first = struct.unpack(layout, self._headers("section", offset, size, 1, layout))
            count = count or first[5]
            names_index = first[6] if names_index == SHN_XINDEX else names_index
        data = self._headers("section", offset, size, count, layout)
        headers = list(struct.iter_unpack(layout, data))
        if names_index >= len(headers):
            return None
        names = self._section_content(headers[names_index])
        for header in headers:
            if names[header[0] : header[0] + len(name) + 1] == name + b"\0":
                return self._section_content(header)
        return None

    def _section_content(self, header: "tuple[int, ...]") -> bytes:
        kind, offset, size = header[1], header[4], header[5]
        if kind == SHT_NOBITS:
            return b""
        if size > MAX_SECTION_SIZE:
            raise self.error(f"has a section of an impossible size ({size})")
        return self.read(offset, size)
