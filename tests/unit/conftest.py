"""Shared parts of unit tests: cases of tests/vectors, made-up libraries and file trees.

A test marked ``vectors("image", "image.privileged")`` runs once, as its argument ``case``, for
every case of those groups of tests/vectors/image.json.
"""

import inspect
import json
import struct
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path

import hypothesis
import own
import pytest
from click.testing import CliRunner
from fabricated import Tree

# Before 8.2, click mixes both outputs unless mix_stderr is False; later it has no mix_stderr.
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = partialmethod(  # type: ignore[method-assign,assignment]
        CliRunner.__init__, mix_stderr=False
    )

# On a busy or emulated host, both an example and its generation may take long.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

_SETTINGS = "_hypothesis_internal_use_settings"  # hypothesis has no public API for this

VECTORS = Path(__file__).parent.parent / "vectors"

ET_DYN = 3
LibraryBuilder = Callable[..., bytes]


def _segments(order: str, bits: int, size: int, dynamic: tuple[int, int]) -> bytes:
    headers = b""
    for kind, offset, length in ((1, 0, size), (2, *dynamic)):
        if bits == 64:
            headers += struct.pack(
                order + "IIQQQQQQ", kind, 6, offset, offset, offset, length, length, 8
            )
        else:
            headers += struct.pack(
                order + "IIIIIIII", kind, offset, offset, offset, length, length, 6, 8
            )
    return headers


def _sections(order: str, bits: int, at: int, sections: dict[str, bytes]) -> bytes:
    """Return section contents, then the headers; the names are in the last section."""
    layout = order + ("IIQQQQIIQQ" if bits == 64 else "IIIIIIIIII")
    names = b"\0" + b"".join(name.encode() + b"\0" for name in sections) + b".shstrtab\0"
    contents, headers = b"", struct.pack(layout, *[0] * 10)
    for name, content in {**sections, ".shstrtab": names}.items():
        index = names.index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack(layout, index, 7, 0, 0, at + len(contents), len(content), 0, 0, 1, 0)
        contents += content + bytes(-len(content) % 8)
    return contents + headers


def build_library(
    soname: str | None = None,
    needed: Sequence[str] = (),
    *,
    bits: int = 64,
    machine: int = own.ELF[0],
    flags: int = own.ELF[1],
    order: str = "<",
    sections: dict[str, bytes] | None = None,
) -> bytes:
    """Return an ELF shared library with only these properties, as ldconfig reads them."""
    wide = bits == 64
    head, segment, entry = (64, 56, "qQ") if wide else (52, 32, "iI")
    strings = b"\0"
    tags: list[tuple[int, int]] = []
    for tag, name in [(1, name) for name in needed] + ([(14, soname)] if soname else []):
        tags.append((tag, len(strings)))
        strings += name.encode() + b"\0"
    at = head + 2 * segment
    table_size = struct.calcsize("=" + entry) * (len(tags) + 3)
    tags += [(5, at + table_size), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack(order + entry, *tag) for tag in tags)
    body = dynamic + strings + bytes(-len(strings) % 8)
    extra, section_fields = b"", (0, 0, 0)
    if sections is not None:
        extra = _sections(order, bits, at + len(body), sections)
        count, size = len(sections) + 2, 64 if wide else 40
        section_fields = (at + len(body) + len(extra) - count * size, count, count - 1)
    size = at + len(body) + len(extra)
    header = struct.pack(
        order + ("HHIQQQIHHHHHH" if wide else "HHIIIIIHHHHHH"),
        *(ET_DYN, machine, 1, 0, head, section_fields[0], flags, head, segment, 2),
        *(64 if wide else 40, section_fields[1], section_fields[2]),
    )
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    return ident + header + _segments(order, bits, size, (at, len(dynamic))) + body + extra


@pytest.fixture(scope="session")
def library() -> LibraryBuilder:
    """The builder of shared libraries: library(soname, needed, bits=, machine=, ...)."""
    return build_library


@pytest.fixture
def tree(tmp_path: Path, library: LibraryBuilder) -> Tree:
    """A simulated host, made of files, for the doctor's checks."""
    return Tree(tmp_path / "machine", library)


def pytest_addoption(parser: pytest.Parser) -> None:
    says = "let no property test try more than N examples, where a processor is slow"
    parser.addoption("--examples", metavar="N", type=int, help=says)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = config.getoption("--examples")
    if limit is None:
        return
    for item in items:
        test = getattr(item, "obj", None)
        used = getattr(test, _SETTINGS, None)
        if used is not None and used.max_examples > limit:
            setattr(test, _SETTINGS, hypothesis.settings(used, max_examples=limit))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vectors(file, *groups): run for the cases of groups")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("vectors")
    if marker is None:
        return
    file, *groups = marker.args
    every = json.loads((VECTORS / f"{file}.json").read_text())["vectors"]
    found = [case for case in every if case["group"].removesuffix(".derived_from_code") in groups]
    missing = set(groups) - {case["group"].removesuffix(".derived_from_code") for case in found}
    if missing:
        raise pytest.UsageError(f"{file}.json has no group {missing}")
    metafunc.parametrize("case", found, ids=[f"{case['group']}: {case['name']}" for case in found])
