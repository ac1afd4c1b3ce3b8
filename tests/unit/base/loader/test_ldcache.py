"""ldcache, compared with the real ldconfig and a reference loader; and damaged caches."""

import os
import re
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cmp_to_key, partial
from itertools import pairwise
from pathlib import Path

import own
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from yardstick import of_this_process

from gpuhook.base.errors import LdCacheError
from gpuhook.base.loader import layout, ldcache

LibraryBuilder = Callable[..., bytes]
Addition = tuple[str, str, int]
X86_64, AARCH64 = 0x303, 0xA03
NEW_HEADER, NEW_ENTRY = "=20sIIB3xI12x", "=iIIIQ"  # formats of the struct module
HOST_CACHE = Path("/etc/ld.so.cache")
FOLDER = own.FOLDER
DRIVER = [
    (f"{FOLDER}/{name}", name)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-glcore.so.535.309.01")
]


def additions(names: list[str], folder: str = FOLDER, flags: int = own.FLAGS) -> list[Addition]:
    return [(name, f"{folder}/{name}", flags) for name in names]


def listing(cache: bytes, tmp_path: Path) -> list[str]:
    """Return the lines "key (abi) => path" that ldconfig prints for a cache."""
    path = tmp_path / "listed.cache"
    path.write_bytes(cache)
    argv = ["ldconfig", "-p", "-C", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if "=>" in line]


def ldconfig(root: Path, *args: str) -> bytes:
    """Run ldconfig twice on a root, because only the second run sees links to new links."""
    for _ in range(2):
        argv = ["ldconfig", "-r", str(root), *args]
        subprocess.run(argv, capture_output=True, check=True)
    return (root / "etc/ld.so.cache").read_bytes()


# The loader's comparison and search, as a reference: like dl-cache.c, character by character,
# and slow.


def c_int(digits: str) -> int:
    value = int(digits) % 2**32
    return value - 2**32 if value >= 2**31 else value


def loader_compare(one: str, two: str) -> int:
    a, b = os.fsencode(one) + b"\0", os.fsencode(two) + b"\0"
    i = j = 0
    while a[i]:
        runs = re.match(rb"[0-9]*", a[i:]), re.match(rb"[0-9]*", b[j:])
        x, y = (run[0].decode() if run else "" for run in runs)
        if x and y:
            if c_int(x) != c_int(y):
                return 1 if c_int(x) > c_int(y) else -1
            i, j = i + len(x), j + len(y)
        elif x or y:
            return 1 if x else -1
        elif a[i] != b[j]:
            return char(a[i]) - char(b[j])
        else:
            i, j = i + 1, j + 1
    return -1 if b[j : j + 1].isdigit() else char(a[i]) - char(b[j])


def char(byte: int) -> int:
    return byte if ldcache.CHAR_UNSIGNED or byte < 128 else byte - 256


def loader_search(cache: bytes, name: str, flags: int) -> str | None:
    entries = ldcache.parse(cache).entries
    left, right = 0, len(entries) - 1
    while left <= right:
        middle = (left + right) // 2
        order = loader_compare(name, entries[middle].key)
        if order == 0:
            while middle and loader_compare(name, entries[middle - 1].key) == 0:
                middle -= 1
            while middle < len(entries) and loader_compare(name, entries[middle].key) == 0:
                if entries[middle].flags == flags:
                    return entries[middle].value
                middle += 1
            return None
        if order < 0:
            left = middle + 1
        else:
            right = middle - 1
    return None


def by_name(one: str, two: str) -> int:
    """Compare lines of ldconfig -p by name, in the order of the cache."""
    return loader_compare(two.split(" ", 1)[0], one.split(" ", 1)[0])


def cache_order(one: ldcache.CacheEntry, two: ldcache.CacheEntry) -> int:
    """Compare entries as glibc's cache.c: descending names and flags, processor folders first."""
    names = loader_compare(two.key, one.key)
    return names or two.flags - one.flags or (two.hwcap != 0) - (one.hwcap != 0)


# Comparisons with the real ldconfig.


def test_the_host_cache_reads_as_ldconfig_reads_it(tmp_path: Path) -> None:
    data = HOST_CACHE.read_bytes()
    lines = listing(data, tmp_path)
    entries = ldcache.parse(data).entries
    assert len(entries) == len(lines)
    for entry, line in zip(entries, lines, strict=True):
        assert line.startswith(f"{entry.key} (")
        assert line.endswith(f"=> {entry.value}")


def test_a_merged_host_cache_keeps_everything_else(tmp_path: Path) -> None:
    data = HOST_CACHE.read_bytes()
    merged = ldcache.merge(data, [("libzz-gpu.so.9", "/opt/gpu/libzz-gpu.so.9", own.FLAGS)])
    assert listing(merged, tmp_path) == sorted(
        [*listing(data, tmp_path), f"libzz-gpu.so.9 ({own.ABI}) => /opt/gpu/libzz-gpu.so.9"],
        key=cmp_to_key(by_name),
    )
    before, after = ldcache.parse(data), ldcache.parse(merged)
    assert (before.generator, before.hwcaps) == (after.generator, after.hwcaps)
    assert [e for e in after.entries if e.key != "libzz-gpu.so.9"] == list(before.entries)


def of_32_bits(library: LibraryBuilder, soname: str | None) -> bytes:
    machine, flags = own.ELF32
    return library(soname, ["libc.so.6"], bits=32, machine=machine, flags=flags)


@pytest.fixture
def root(tmp_path: Path, library: LibraryBuilder) -> Path:
    """A small image: two folders, both ABIs, an old and a new libz, and a hwcaps folder."""
    base = tmp_path / "root"
    (base / "etc").mkdir(parents=True)
    (base / "etc/ld.so.conf").write_text(f"/usr/local/lib\n{FOLDER}\n/usr/lib32\n")
    files = {
        "usr/local/lib/libz.so.1.2.9": library("libz.so.1"),
        f"{FOLDER[1:]}/libz.so.1.3.1": library("libz.so.1"),
        f"{FOLDER[1:]}/libz.so.1.2.13": library("libz.so.1"),
        f"{FOLDER[1:]}/libm10k.so.2": library("libm10k.so.2"),
        f"{FOLDER[1:]}/libm9k.so.2": library("libm9k.so.2"),
        f"{FOLDER[1:]}/libcudart.so.12.2.140": library("libcudart.so.12"),
        f"{FOLDER[1:]}/libnvidia-ml.so.470.1": library("libnvidia-ml.so.1"),
        f"{FOLDER[1:]}/glibc-hwcaps/x86-64-v2/libz.so.1": library("libz.so.1"),
        "usr/lib32/libz.so.1.1": library(
            "libz.so.1", ["libc.so.6"], bits=32, machine=own.ELF32[0], flags=own.ELF32[1]
        ),
    }
    for path, content in files.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(content)
    (base / FOLDER[1:] / "libz.so").symlink_to("libz.so.1")
    return base


DRIVER_FILES: list[tuple[str, str | None]] = [
    ("libcuda.so.535.309.01", "libcuda.so.1"),
    ("libcuda.so.99.1", "libcuda.so.1"),
    ("libnvidia-ml.so.535.309.01", "libnvidia-ml.so.1"),
    ("libnvidia-glcore.so.535.309.01", "libnvidia-glcore.so.535.309.01"),
    ("libnvidia-nosoname.so.535.309.01", None),
    ("libz.so.7", "libz.so.1"),
    ("libGLX_nvidia.so.535.309.01", "libGLX_nvidia.so.0"),
    ("nvidia_drv.so", "nvidia_drv.so"),
]
DRIVER_LINKS = {
    "libcuda.so": "libcuda.so.1",
    "libGLX_indirect.so.0": "libGLX_nvidia.so.535.309.01",
}


def add_driver(folder: Path, built: Callable[[str | None], bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, soname in DRIVER_FILES:
        (folder / name).write_bytes(built(soname))
    for link, target in DRIVER_LINKS.items():
        (folder / link).symlink_to(target)


@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_merging_gives_the_same_cache_as_ldconfig(
    root: Path, library: LibraryBuilder, tmp_path: Path, form: str
) -> None:
    image = ldconfig(root, "-c", form)
    add_driver(root / "opt/gpu", library)
    add_driver(root / "opt/gpu32", partial(of_32_bits, library))
    merged = ldcache.merge(
        image,
        layout.cache_entries("/opt/gpu", DRIVER_FILES, own.FLAGS, DRIVER_LINKS)
        + layout.cache_entries("/opt/gpu32", DRIVER_FILES, own.FLAGS32, DRIVER_LINKS),
    )
    wanted = listing(ldconfig(root, "-c", "new", "/opt/gpu", "/opt/gpu32"), tmp_path)
    found = listing(merged, tmp_path)
    if form == "old":
        # The format before glibc 2.2 can't restrict a library to certain processors.
        wanted, found = ([x for x in lines if "hwcaps" not in x] for lines in (wanted, found))
    assert found == wanted
    made = {
        link: str(Path(os.readlink(root / "opt/gpu" / link))) for link in layout.links(DRIVER_FILES)
    }
    assert made == layout.links(DRIVER_FILES)


def test_merging_libraries_in_an_image_folder_matches_ldconfig(
    root: Path, library: LibraryBuilder, tmp_path: Path
) -> None:
    image = ldconfig(root)
    add_driver(root / FOLDER[1:], library)
    ours = [file for file in DRIVER_FILES if not file[0].startswith("libz")]
    entries = layout.cache_entries(FOLDER, ours, own.FLAGS, DRIVER_LINKS)
    assert listing(ldcache.merge(image, entries), tmp_path) == listing(ldconfig(root), tmp_path)


def test_a_compat_cache_has_the_entries_of_a_new_one(root: Path) -> None:
    new, compat = (ldcache.parse(ldconfig(root, "-c", form)) for form in ("new", "compat"))
    assert new.entries == compat.entries
    assert new.hwcaps == compat.hwcaps == ("x86-64-v2",)
    hwcaps = [entry for entry in new.entries if entry.hwcap]
    assert [entry.hwcap >> 62 for entry in hwcaps] == [1]


def test_hwcaps_folders_and_generator_are_kept_by_merging(root: Path) -> None:
    image = ldconfig(root)
    before, after = (
        ldcache.parse(data) for data in (image, ldcache.merge(image, additions(["libcuda.so.1"])))
    )
    assert after.hwcaps == before.hwcaps == ("x86-64-v2",)
    assert after.generator == before.generator
    assert after.generator is not None
    assert after.generator.startswith("ldconfig (")


def test_added_driver_libraries_come_first(root: Path) -> None:
    image = ldconfig(root)
    name = "libnvidia-ml.so.1"
    assert loader_search(image, name, own.FLAGS) == f"{FOLDER}/{name}"
    merged = ldcache.merge(image, additions([name], "/opt/gpu"))
    assert loader_search(merged, name, own.FLAGS) == f"/opt/gpu/{name}"
    values = [entry.value for entry in ldcache.parse(merged).entries if entry.key == name]
    assert values == [f"/opt/gpu/{name}", f"{FOLDER}/{name}"]


def test_equal_additions_keep_their_order_without_duplicates() -> None:
    both = [("libcuda.so.1", f"/opt/{n}/libcuda.so.1", own.FLAGS) for n in ("compat", "gpu", "gpu")]
    merged = ldcache.merge(None, both)
    values = [entry.value for entry in ldcache.parse(merged).entries]
    assert values == ["/opt/compat/libcuda.so.1", "/opt/gpu/libcuda.so.1"]


@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_merging_twice_changes_nothing(root: Path, form: str) -> None:
    entries = additions([name for _path, name in DRIVER])
    once = ldcache.merge(ldconfig(root, "-c", form), entries)
    assert ldcache.merge(once, entries) == once
    assert ldcache.merge(once, []) == once


@pytest.mark.parametrize("nothing", [None, b""])
def test_merging_into_a_missing_cache_lists_only_driver_libraries(
    nothing: bytes | None, tmp_path: Path
) -> None:
    merged = ldcache.merge(nothing, additions(["libcuda.so.1", "libnvidia-ml.so.1"]))
    assert listing(merged, tmp_path) == [
        f"libnvidia-ml.so.1 ({own.ABI}) => {FOLDER}/libnvidia-ml.so.1",
        f"libcuda.so.1 ({own.ABI}) => {FOLDER}/libcuda.so.1",
    ]
    assert ldcache.parse(merged).generator == "gpuhook"


@given(st.permutations(range(40)))
def test_added_libraries_are_found_in_an_unsorted_cache(order: list[int]) -> None:
    image = ldcache.merge(None, additions([f"lib{n:02}.so" for n in order], "/a"))
    start, end = ldcache.NEW_HEADER_SIZE, ldcache.NEW_HEADER_SIZE + 40 * ldcache.NEW_ENTRY_SIZE
    lines = [image[at : at + 24] for at in range(start, end, 24)]
    shuffled = image[:start] + b"".join(lines[n] for n in order) + image[end:]
    names = ["lib07.so", "lib33.so", "libcuda.so.1"]
    merged = ldcache.merge(shuffled, additions(names, "/gpu"))
    for name in names:
        assert loader_search(merged, name, own.FLAGS) == f"/gpu/{name}"
    assert {e.key for e in ldcache.parse(image).entries} <= {
        e.key for e in ldcache.parse(merged).entries
    }
    assert ldcache.merge(merged, additions(names, "/gpu")) == merged


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_an_unwritable_name_or_path_is_refused(name: str) -> None:
    with pytest.raises(LdCacheError, match="can't be written"):
        ldcache.merge(None, [("libcuda.so.1", name, own.FLAGS)])
    with pytest.raises(LdCacheError, match="can't be written"):
        ldcache.merge(None, [(name[:256], f"/lib/{name}", own.FLAGS)])


# Damage.


def damaged(offset: int, layout: str, *values: int) -> bytes:
    data = bytearray(ldcache.merge(None, additions(["libcuda.so.1", "libnvidia-ml.so.1"])))
    struct.pack_into("=" + layout, data, offset, *values)
    return bytes(data)


EXTENSION = struct.unpack_from("=I", damaged(0, "0s", b""), 32)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begin"),
        (b"glibc-ld.so.cache1.1", "begin"),
        (b"glibc-ld.so.cache1.2" + bytes(40), "begin"),
        (b"ld.so-1.7.0\0", "ends inside its header"),
        (b"ld.so-1.7.0\0\xff\xff\xff\xff", "no space for its 4294967295 entries"),
        (damaged(20, "I", 1 << 31), "no space for its 2147483648 entries"),
        (damaged(24, "I", 1 << 31), "no space"),
        (damaged(28, "B", 5 - ldcache.NATIVE_ENDIAN), "another byte order"),
        (damaged(28, "B", 1), "another byte order"),
        (damaged(48 + 4, "I", 1 << 30), "a name lies outside"),
        (damaged(48 + 8, "I", 0), "a name lies outside"),
        (damaged(32, "I", 1 << 30), "extension lies outside"),
        (damaged(32, "I", 3), "extension lies outside"),
        (damaged(EXTENSION, "I", 7), "extension is not one"),
        (damaged(EXTENSION + 4, "I", 1 << 30), "extension is not one"),
        (damaged(EXTENSION + 16, "I", 1 << 30), "section of its extension lies outside"),
        (damaged(EXTENSION + 8, "III", 1, 0, 1 << 30), "section of its extension lies outside"),
        (damaged(EXTENSION + 8, "IIII", 1, 0, 0, 3), "cut short"),
        (damaged(EXTENSION + 8, "IIII", 1, 0, 0, 4), "processor folder lies outside"),
        (
            struct.pack(NEW_HEADER, b"glibc-ld.so.cache1.1", 0, 5000, 2, 0) + b"x" * 4999 + b"\0",
            "more than 4095 bytes",
        ),
        (b"glibc-ld.so.cache1.1" + bytes(5 << 20), "it has 5242900 bytes"),
    ],
)
def test_a_damaged_cache_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(LdCacheError, match=message) as caught:
        ldcache.parse(data, "/image/etc/ld.so.cache")
    assert caught.value.cause.startswith("/image/etc/ld.so.cache ")
    if data:
        with pytest.raises(LdCacheError, match=message):
            ldcache.merge(data, additions(["libcuda.so.1"]))


def costly(count: int) -> bytes:
    """Return an unsorted cache with names of the maximal length."""
    chunks = [(b"a%d" % n * 127)[: ldcache.MAX_KEY] + b"\0" for n in range(8_000)]
    base = ldcache.NEW_HEADER_SIZE + ldcache.NEW_ENTRY_SIZE * count
    entries = bytearray()
    for n in range(count):
        at = base + n * 7919 % len(chunks) * 256 + n % 3
        entries += struct.pack(NEW_ENTRY, own.FLAGS, at, at, 0, 0)
    size = sum(map(len, chunks))
    fields = (ldcache.NEW_MAGIC, count, size, ldcache.NATIVE_ENDIAN, 0)
    return b"".join((struct.pack(NEW_HEADER, *fields), entries, *chunks))


def test_a_cache_made_for_slow_comparison_is_merged_fast() -> None:
    data = costly(ldcache.MAX_ENTRIES)
    names = [f"a{n}a{n}.so" for n in range(60)]

    def read() -> None:
        ldcache.merge(data, additions(names))
        ldcache._Raw(data, "").sort()

    # A yardstick: plain work that takes a tenth of a second, and longer on a slow host.
    least = of_this_process(lambda: sorted(range(1_000_000), key=str))
    assert of_this_process(read) < 40 * least


def test_a_cache_with_too_many_entries_is_refused() -> None:
    with pytest.raises(LdCacheError, match="it has 20001 entries"):
        ldcache.parse(costly(ldcache.MAX_ENTRIES + 1))


def test_a_key_longer_than_a_file_name_is_refused() -> None:
    cache = ldcache.merge(None, additions(["libcuda.so.1"], "/" + "x" * 400))
    data = bytearray(cache)
    struct.pack_into("=I", data, 48 + 4, struct.unpack_from("=I", data, 48 + 8)[0])
    with pytest.raises(LdCacheError, match="more than 255 bytes"):
        ldcache.merge(bytes(data), additions(["libcuda.so.1"]))


def survive(data: bytes) -> None:
    """Read and merge a cache; unless refused, merging finds the library and is idempotent."""
    with suppress(LdCacheError):
        ldcache.parse(data)
    with suppress(LdCacheError):
        merged = ldcache.merge(data, additions(["libcuda.so.1"]))
        assert loader_search(merged, "libcuda.so.1", own.FLAGS) is not None
        assert ldcache.merge(merged, additions(["libcuda.so.1"])) == merged


@given(st.binary(max_size=300))
def test_arbitrary_cache_bytes_cause_no_crash(tail: bytes) -> None:
    old = b"ld.so-1.7.0\0" + struct.pack("=I", len(tail) // 24)
    new = struct.pack(
        "=20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(tail) // 48, len(tail) // 4, 2, 0
    )
    for head in (b"", old, new, old + new):
        survive(head + tail)


@pytest.fixture(scope="module")
def real_caches() -> list[bytes]:
    """Small caches in all three formats, as ldconfig would write them, and the host's cache."""
    small = ldcache.merge(None, additions([f"lib{n}.so.{n}" for n in range(9)]))
    base = 48 + 9 * 24
    strings = small[base : struct.unpack_from("=I", small, 24)[0] + base]
    old = [struct.unpack_from("=iII", small, 48 + 24 * n) for n in range(9)]
    block = b"ld.so-1.7.0\0" + struct.pack("=I", 9)
    block += b"".join(struct.pack("=iII", f, k - base, v - base) for f, k, v in old)
    padding = bytes(-len(block) % 8)
    return [small, block + strings, block + padding + small, HOST_CACHE.read_bytes()]


@given(st.data())
def test_mutated_caches_cause_no_crash(real_caches: list[bytes], data: st.DataObject) -> None:
    cache = bytearray(data.draw(st.sampled_from(real_caches)))
    places = st.one_of(st.integers(0, 80), st.integers(0, len(cache) - 1))
    changes = st.tuples(places, st.integers(0, 255))
    for place, value in data.draw(st.lists(changes, min_size=1, max_size=6)):
        cache[place] = value
    end = data.draw(st.one_of(st.just(len(cache)), st.integers(0, len(cache))))
    survive(bytes(cache[:end]))


# Order.

names = st.text(alphabet="abz019.-_\xe9\x7f Z", max_size=14)
long_numbers = st.integers(0, 2**70).map(lambda n: f"lib.so.{n}")
words = st.one_of(
    names, long_numbers, st.from_regex(r"lib[a-c]{1,2}-?[0-9]{0,2}\.so", fullmatch=True)
)


@given(words, words)
def test_keys_are_compared_as_by_the_loader(one: str, two: str) -> None:
    a, b = (ldcache.order_key(os.fsencode(name)) for name in (one, two))
    wanted = loader_compare(one, two)
    assert ((a > b) - (a < b)) == (wanted > 0) - (wanted < 0)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("libz.so", "libz.so.1"),
        ("libz.so.9", "libz.so.10"),
        ("libz.so.1", "libzstd.so.1"),
        ("libabc.so", "lib1.so"),
        ("lib2147483648.so", "lib0.so"),
        ("libcuda.so.1", "libcuda.so.535.54"),
        ("libcuda.so.535.54", "libcuda.so.535.309.01"),
    ],
)
def test_names_are_ordered_as_by_the_loader(low: str, high: str) -> None:
    assert ldcache.order_key(low.encode()) < ldcache.order_key(high.encode())


def test_leading_zeros_do_not_change_the_order() -> None:
    assert ldcache.order_key(b"lib01.so") == ldcache.order_key(b"lib1.so")


folders = st.sampled_from(["/a", "/b", "/usr/lib"])
entries = st.lists(
    st.tuples(words.filter(bool), folders, st.sampled_from([X86_64, AARCH64, own.FLAGS32])).map(
        lambda t: (t[0], f"{t[1]}/{t[0]}", t[2])
    ),
    max_size=25,
)


@given(entries, entries)
def test_merging_equals_a_stable_sort(image: list[Addition], ours: list[Addition]) -> None:
    base = ldcache.merge(None, image)
    assume(is_ordered(base))
    merged = ldcache.merge(base, ours)
    first = [ldcache.CacheEntry(*addition, 0, 0) for addition in dict.fromkeys(ours)]
    rest = [entry for entry in ldcache.parse(base).entries if entry not in first]
    wanted = sorted([*first, *rest], key=cmp_to_key(cache_order))
    assert list(ldcache.parse(merged).entries) == wanted
    for entry in wanted:
        same = [e for e in wanted if loader_compare(e.key, entry.key) == 0]
        found = loader_search(merged, entry.key, entry.flags)
        assert found == next(e.value for e in same if e.flags == entry.flags)


def is_ordered(cache: bytes) -> bool:
    listed = ldcache.parse(cache).entries
    return all(cache_order(a, b) <= 0 for a, b in pairwise(listed))
