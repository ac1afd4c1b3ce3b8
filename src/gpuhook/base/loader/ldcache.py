"""Reader of ld.so.cache, and writer of a new one with the driver's libraries, as by ldconfig.

Sources: the layout in glibc's sysdeps/generic/dl-cache.h, the look-up in its
elf/dl-cache.c, the order in its elf/cache.c. The loader uses binary search, so it misses an
entry in the wrong place: entries are never appended. Every offset is checked before it is used.
A damaged cache raises LdCacheError and is never read beyond its bounds.

Numbers are read through memoryview, because importing struct costs half of what a merge does.
"""

import os
import sys

from gpuhook.base.errors import LdCacheError
from gpuhook.base.names import machine_name
from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # Flags, offset of the key, offset of the value, osversion, hwcap; offsets count from
    # the start of the strings.
    RawEntry = tuple[int, int, int, int, int]

OLD_MAGIC = b"ld.so-1.7.0"
OLD_HEADER_SIZE = 16
OLD_ENTRY_WORDS = 3
OLD_ENTRY_SIZE = 4 * OLD_ENTRY_WORDS
NEW_MAGIC = b"glibc-ld.so.cache1.1"
NEW_HEADER_SIZE = 48
NEW_ENTRY_WORDS = 6
NEW_ENTRY_SIZE = 4 * NEW_ENTRY_WORDS
EXTENSION_MAGIC = 0xEAA42174
EXTENSION_HEADER_SIZE = 8
EXTENSION_SECTION_WORDS = 4
EXTENSION_SECTION_SIZE = 4 * EXTENSION_SECTION_WORDS
TAG_GENERATOR, TAG_HWCAPS = 0, 1
GENERATOR = b"gpuhook"

# The header's byte order (cache_file_new_flags_endian_*); glibc before 2.33 wrote 0.
ENDIAN_UNSET, ENDIAN_LITTLE, ENDIAN_BIG = 0, 2, 3
NATIVE_ENDIAN = ENDIAN_LITTLE if sys.byteorder == "little" else ENDIAN_BIG

# Limits that no real cache reaches, so that a forged one costs neither time nor memory.
MAX_SIZE = 4 << 20
MAX_ENTRIES = 20_000
MAX_STRING = 4095  # PATH_MAX without its NUL
MAX_KEY = 255  # NAME_MAX
MAX_SECTIONS = 64
MAX_SECTION_SIZE = 64 << 10

# Where char is unsigned the loader orders the bytes above 0x7f after ASCII, else before.
CHAR_UNSIGNED = machine_name().startswith(("aarch64", "arm", "ppc", "riscv", "s390"))


class CacheEntry:
    """A cache entry: the library named ``key`` is the file at ``value``.

    ``flags`` is the ABI (``layout.cache_flags``), ``osversion`` the minimum kernel (0: any),
    ``hwcap`` the required processor (0: any). With bit 62 of ``hwcap`` (glibc 2.33 and newer),
    its low 32 bits are an index into ``Cache.hwcaps``.
    """

    __slots__ = ("flags", "hwcap", "key", "osversion", "value")

    # No Record: that would take a millisecond longer for a cache's thousand entries.
    def __init__(self, key: str, value: str, flags: int, osversion: int, hwcap: int) -> None:
        self.key = key
        self.value = value
        self.flags = flags
        self.osversion = osversion
        self.hwcap = hwcap

    def fields(self) -> tuple[str, str, int, int, int]:
        """Return all fields, which identify an entry."""
        return self.key, self.value, self.flags, self.osversion, self.hwcap

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheEntry) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.fields())

    def __repr__(self) -> str:
        return f"CacheEntry{self.fields()!r}"


class Cache(Record):
    """A parsed ld.so.cache.

    ``entries`` keep the file's order, which is the loader's; strings that are not UTF-8 are
    decoded like file names (os.fsdecode). ``hwcaps`` are the names of glibc-hwcaps
    folders, ``generator`` is the text of the program that wrote it (None in old formats),
    ``endian`` the header's byte-order mark.
    """

    entries: tuple[CacheEntry, ...]
    hwcaps: tuple[str, ...]
    generator: str | None
    endian: int


def parse(data: bytes, path: str = "ld.so.cache") -> Cache:
    """Return the content of the cache in ``data``, in any of glibc's three formats.

    ``path`` is only for messages. Raises LdCacheError if the data is not a cache of this
    machine's byte order, or if a count or an offset leads outside of it.
    """
    raw = _Raw(data, path)
    entries = tuple(
        CacheEntry(raw.text(key), raw.text(value), flags, osversion, hwcap)
        for flags, key, value, osversion, hwcap in raw.entries
    )
    hwcaps: tuple[str, ...] = ()
    generator = None
    for tag, _flags, content in raw.sections:
        if tag == TAG_HWCAPS:
            hwcaps = tuple(raw.text(offset) for offset in _words(content))
        elif tag == TAG_GENERATOR:
            generator = os.fsdecode(content)
    return Cache(entries, hwcaps, generator, raw.endian)


def merge(
    data: bytes | None, additions: "Iterable[tuple[str, str, int]]", path: str = "ld.so.cache"
) -> bytes:
    """Return the cache in ``data`` with ``additions`` in it, in the format of glibc >= 2.2.

    Each addition is a SONAME, the absolute path of the library in the container, and its
    flags. They precede entries of the same name and flags, as if their folders had been on
    ldconfig's command line, in the given order. An identical entry is not repeated. Everything
    else is kept. Without data the result has only the additions. Merging the same additions again
    returns the same bytes.

    ``path`` is only for messages. Raises LdCacheError as ``parse`` does.
    """
    raw = _Raw(data, path) if data else _Raw.empty()
    before = list(raw.entries)
    merged = [raw.add(*addition) for addition in additions]
    raw.insert(merged)
    if not all(raw.is_found(entry) for entry in merged):
        raw.entries = list(before)
        raw.sort()
        raw.insert(merged)
    return data if data and raw.entries == before else raw.assemble()


def order_key(name: bytes) -> "tuple[bytes | int, ...]":
    """Return a sort key that compares like the loader compares names (_dl_cache_libcmp).

    Runs of digits compare as C ints (which wrap), a digit is greater than anything else, the
    rest compares by bytes. The cache is in descending order. The key alternates words and
    numbers; a word's last byte tells whether a number or the end follows.
    """
    words = name.translate(_WORDS).split()
    numbers = name.translate(_NUMBERS).split()
    if not numbers:
        return (words[0] + _END,) if words else (_END,)
    if name[:1].isdigit():
        words.insert(0, b"")
    last = _END if name[-1:].isdigit() else words.pop() + _END
    key: list[bytes | int] = []
    for word, number in zip(words, numbers, strict=True):
        key += (word + _NUMBER, _c_int(number))
    key.append(last)
    return tuple(key)


def _c_int(digits: bytes) -> int:
    # 10**32 is a multiple of 2**32, so only the last 32 digits matter for an int.
    value = int(digits[-32:]) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _tables() -> tuple[bytes, bytes, bytes]:
    """Return the translations for ``order_key``: words, numbers, the end's byte.

    ``words`` maps digits to blanks, and other bytes, in the loader's order, to bytes that are
    neither white space for split() nor 0xff, which stands for a number.
    """
    digits, blanks = b"0123456789", b" \t\n\r\v\f"
    low, high = bytes(range(128)), bytes(range(128, 256))
    names = (low + high if CHAR_UNSIGNED else high + low).translate(None, digits)
    ranks = bytes(range(255)).translate(None, blanks)[: len(names)]
    words = bytes.maketrans(names + digits, ranks + b" " * len(digits))
    return words, bytes.maketrans(names, b" " * len(names)), words[:1]


_WORDS, _NUMBERS, _END = _tables()
_NUMBER = b"\xff"


def _words(data: bytes) -> list[int]:
    """Return the 32-bit numbers in the data, in this machine's byte order."""
    return memoryview(data).cast("I").tolist()


def _bytes(*words: int) -> bytes:
    """Return 32-bit numbers as bytes, in this machine's byte order."""
    return b"".join([word.to_bytes(4, sys.byteorder) for word in words])


def _header(count: int, size: int, endian: int, extension: int) -> bytes:
    return NEW_MAGIC + _bytes(count, size) + bytes((endian, 0, 0, 0)) + _bytes(extension, 0, 0, 0)


class _Raw:
    """A cache in the file's form: entries by offset, one pool of strings, sections."""

    __slots__ = ("_keys", "_names", "_path", "endian", "entries", "sections", "strings")

    def __init__(self, data: bytes, path: str) -> None:
        self._path = path
        self._keys: dict[int, tuple[bytes | int, ...]] = {}
        self.entries: list[RawEntry] = []
        self.sections: list[tuple[int, int, bytes]] = []
        self.strings = b""
        self.endian = NATIVE_ENDIAN
        if len(data) > MAX_SIZE:
            raise self._damaged(f"it has {len(data)} bytes")
        start = self._new_start(data)
        if start < 0:
            self._read_old(data)
        else:
            self._read_new(data[start:] if start else data, data)

    @classmethod
    def empty(cls) -> "_Raw":
        """Return a cache without entries, with our name as its generator."""
        raw = cls(_header(0, 0, NATIVE_ENDIAN, 0), "ld.so.cache")
        raw.sections.append((TAG_GENERATOR, 0, GENERATOR))
        return raw

    def _damaged(self, why: str) -> LdCacheError:
        return LdCacheError(
            f"{self._path} is damaged or not a loader cache: {why}",
            "Run ldconfig in the image, or delete the file from it",
        )

    def _new_start(self, data: bytes) -> int:
        """Return the offset of the new format; -1 if there is only the old."""
        if not data.startswith(OLD_MAGIC):
            return 0
        if len(data) < OLD_HEADER_SIZE:
            raise self._damaged("it ends inside its header")
        (count,) = _words(data[12:OLD_HEADER_SIZE])
        end = OLD_HEADER_SIZE + count * OLD_ENTRY_SIZE
        self._check_count(count, end, data)
        # struct cache_file_new has an alignment of 8, and of 4 on i386.
        for align in (8, 4):
            start = -(-end // align) * align
            if data.startswith(NEW_MAGIC, start):
                return start
        return -1

    def _read_old(self, data: bytes) -> None:
        (count,) = _words(data[12:OLD_HEADER_SIZE])
        end = OLD_HEADER_SIZE + count * OLD_ENTRY_SIZE
        self._set_strings(data[end:])
        table = memoryview(data)[OLD_HEADER_SIZE:end]
        flags = table.cast("i")[::OLD_ENTRY_WORDS].tolist()
        keys, values = (table.cast("I")[n::OLD_ENTRY_WORDS].tolist() for n in (1, 2))
        none = [0] * count
        self.entries = list(zip(flags, keys, values, none, none, strict=True))
        self._check_offsets()

    def _read_new(self, data: bytes, file: bytes) -> None:
        if len(data) < NEW_HEADER_SIZE or not data.startswith(NEW_MAGIC):
            raise self._damaged("it doesn't begin like one")
        count, size, _, extension = _words(data[20:36])
        endian = data[28]
        if endian not in (ENDIAN_UNSET, NATIVE_ENDIAN):
            raise self._damaged("it was written for another byte order")
        self.endian = endian
        base = NEW_HEADER_SIZE + count * NEW_ENTRY_SIZE
        self._check_count(count, base + size, data)
        self._set_strings(data[base : base + size])
        table = memoryview(data)[NEW_HEADER_SIZE:base]
        flags = table.cast("i")[::NEW_ENTRY_WORDS].tolist()
        words = (table.cast("I")[n::NEW_ENTRY_WORDS].tolist() for n in (1, 2, 3))
        hwcaps = table.cast("Q")[2 :: NEW_ENTRY_WORDS // 2].tolist()
        self.entries = [
            (flag, key - base, value - base, osversion, hwcap)
            for flag, key, value, osversion, hwcap in zip(flags, *words, hwcaps, strict=True)
        ]
        self._check_offsets()
        if extension:
            # Strings are relative to the new header, but the extension to the file's start.
            self._read_extension(file, extension, base)

    def _check_count(self, count: int, end: int, data: bytes) -> None:
        if end > len(data):
            raise self._damaged(f"it has no space for its {count} entries")
        if count > MAX_ENTRIES:
            raise self._damaged(f"it has {count} entries")

    def _set_strings(self, strings: bytes) -> None:
        # Data after the last NUL isn't part of any string.
        self.strings = strings[: strings.rfind(b"\0") + 1]
        self._names = set(self.strings.split(b"\0"))
        if max(map(len, self._names)) > MAX_STRING:
            raise self._damaged(f"it has a name of more than {MAX_STRING} bytes")

    def _check_offsets(self) -> None:
        end = len(self.strings)
        for _flags, key, value, _osversion, _hwcap in self.entries:
            if not (0 <= key < end and 0 <= value < end):
                raise self._damaged("a name lies outside its strings")

    def _read_extension(self, data: bytes, start: int, base: int) -> None:
        if start % 4 or start + EXTENSION_HEADER_SIZE > len(data):
            raise self._damaged("its extension lies outside it")
        magic, count = _words(data[start : start + EXTENSION_HEADER_SIZE])
        table = start + EXTENSION_HEADER_SIZE
        end = table + count * EXTENSION_SECTION_SIZE
        if magic != EXTENSION_MAGIC or count > MAX_SECTIONS or end > len(data):
            raise self._damaged("its extension is not one")
        for at in range(table, end, EXTENSION_SECTION_SIZE):
            tag, flags, offset, size = _words(data[at : at + EXTENSION_SECTION_SIZE])
            if offset + size > len(data) or size > MAX_SECTION_SIZE:
                raise self._damaged("a section of its extension lies outside it")
            content = data[offset : offset + size]
            if tag == TAG_HWCAPS:
                content = self._relative(content, base)
            self.sections.append((tag, flags, content))

    def _relative(self, content: bytes, base: int) -> bytes:
        if len(content) % 4:
            raise self._damaged("its list of processor folders is cut short")
        offsets = [offset - base for offset in _words(content)]
        if any(not 0 <= offset < len(self.strings) for offset in offsets):
            raise self._damaged("the name of a processor folder lies outside its strings")
        return _bytes(*offsets)

    def string(self, offset: int) -> bytes:
        """Return the string at ``offset``, which must have been checked."""
        return self.strings[offset : self.strings.index(b"\0", offset)]

    def text(self, offset: int) -> str:
        """Return the string at ``offset`` as a file name."""
        return os.fsdecode(self.string(offset))

    def key(self, offset: int) -> "tuple[bytes | int, ...]":
        """Return the ``order_key`` of the string at ``offset``."""
        key = self._keys.get(offset)
        if key is None:
            name = self.string(offset)
            if len(name) > MAX_KEY:
                raise self._damaged(f"it has a library's name of more than {MAX_KEY} bytes")
            key = self._keys[offset] = order_key(name)
        return key

    def add(self, name: str, value: str, flags: int) -> "RawEntry":
        """Return a new entry, not yet inserted; a name at the end of the value shares its bytes."""
        path, key = self._checked(value, MAX_STRING), self._checked(name, MAX_KEY)
        at = self._offset(path)
        if path.endswith(key):
            return flags, at + len(path) - len(key), at, 0, 0
        return flags, self._offset(key), at, 0, 0

    def _checked(self, name: str, limit: int) -> bytes:
        encoded = os.fsencode(name)
        if b"\0" in encoded or not 0 < len(encoded) <= limit:
            raise LdCacheError(
                f"{name[:80]!r} can't be written to {self._path}",
                f"Give the library a name of 1 to {limit} bytes without NUL",
            )
        return encoded

    def _offset(self, string: bytes) -> int:
        if string in self._names:
            return (b"\0" + self.strings).index(b"\0" + string + b"\0")
        self._names.add(string)
        at = len(self.strings)
        self.strings += string + b"\0"
        return at

    def insert(self, additions: "list[RawEntry]") -> None:
        """Insert entries in the loader's order, before equal ones; drop repetitions."""
        # Backwards, because each goes before its equals.
        for entry in reversed(additions):
            self._insert(entry)

    def _insert(self, entry: "RawEntry") -> None:
        start, end = self._search(self.key(entry[1]))
        says = self._says(entry)
        kept = [other for other in self.entries[start:end] if self._says(other) != says]
        # Higher flags come first; for the same flags, entries for a certain processor.
        place = 0
        for other in kept:
            if other[0] < entry[0] or (other[0] == entry[0] and not other[4]):
                break
            place += 1
        kept.insert(place, entry)
        self.entries[start:end] = kept

    def _says(self, entry: "RawEntry") -> "tuple[int, bytes, bytes, int]":
        return entry[0], self.string(entry[1]), self.string(entry[2]), entry[4]

    def is_found(self, entry: "RawEntry") -> bool:
        """Tell whether the loader finds ``entry``: not if the image's cache is out of order."""
        start, end = self._search(self.key(entry[1]))
        return entry in self.entries[start:end]

    def _search(self, key: "tuple[bytes | int, ...]") -> tuple[int, int]:
        """Return begin and end of the entries with that key (search_cache, dl-cache.c).

        Follows the loader's steps exactly, so a cache out of order misleads both in the same way.
        """
        entries = self.entries
        left, right = 0, len(entries) - 1
        while left <= right:
            middle = (left + right) // 2
            found = self.key(entries[middle][1])
            if found == key:
                break
            if key < found:
                left = middle + 1
            else:
                right = middle - 1
        else:
            return left, left
        start = end = middle
        while start > 0 and self.key(entries[start - 1][1]) == key:
            start -= 1
        while end < len(entries) and self.key(entries[end][1]) == key:
            end += 1
        return start, end

    def sort(self) -> None:
        """Sort entries into the loader's order; equal ones keep theirs."""
        self.entries.sort(
            key=lambda entry: (self.key(entry[1]), entry[0], entry[4] != 0), reverse=True
        )

    def assemble(self) -> bytes:
        """Return the file's bytes, in the new format."""
        count = len(self.entries)
        base = NEW_HEADER_SIZE + count * NEW_ENTRY_SIZE
        size = base + len(self.strings)
        padding = -size % 4 if self.sections else 0
        extension = size + padding if self.sections else 0
        return b"".join(
            (
                _header(count, len(self.strings), self.endian, extension),
                self._table(base),
                self.strings,
                bytes(padding),
                self._extension(extension, base),
            )
        )

    def _table(self, base: int) -> bytearray:
        """Return the entries, with string offsets relative to ``base``."""
        table = bytearray(len(self.entries) * NEW_ENTRY_SIZE)
        words, hwcaps = memoryview(table).cast("I"), memoryview(table).cast("Q")
        at = 0
        for flags, key, value, osversion, hwcap in self.entries:
            words[at] = flags & 0xFFFFFFFF
            words[at + 1] = key + base
            words[at + 2] = value + base
            words[at + 3] = osversion
            hwcaps[at // 2 + 2] = hwcap
            at += NEW_ENTRY_WORDS
        return table

    def _extension(self, start: int, base: int) -> bytes:
        if not self.sections:
            return b""
        table = [_bytes(EXTENSION_MAGIC, len(self.sections))]
        contents = b""
        at = start + EXTENSION_HEADER_SIZE + EXTENSION_SECTION_SIZE * len(self.sections)
        # The list of folders first, because the loader expects it to be aligned.
        for tag, flags, content in sorted(self.sections, key=lambda section: -section[0]):
            absolute = content
            if tag == TAG_HWCAPS:
                absolute = _bytes(*(base + offset for offset in _words(content)))
            table.append(_bytes(tag, flags, at + len(contents), len(content)))
            contents += absolute + bytes(-len(absolute) % 4 if tag != TAG_GENERATOR else 0)
        return b"".join((*table, contents))
