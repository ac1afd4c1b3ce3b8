"""In root filesystems of real distributions, the loader's results agree with a full ldconfig."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from harness import bundles, distributions
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.installation import Installation, write_config
from harness.loader import (
    CACHE,
    Gpuhook,
    Operation,
    hosts_libraries,
    listed,
    names_in_cache,
    parts,
    probed,
    script,
)
from harness.namespaces import Namespace
from harness.snapshot import nothing_left

DEBIANS = pytest.mark.parametrize("root", distributions.DEBIANS, indirect=True)
# The root with /usr/lib64 has Debian's loader, which searches that folder only because of a cache
# or ld.so.conf.
GLIBC = pytest.mark.parametrize("root", [*distributions.DEBIANS, "lib64"], indirect=True)
EVERYTHING = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")
OLDER = "535.309.01"
# ldconfig doesn't create this link, and doesn't enter this name in the cache.
NOT_LDCONFIGS = "libGLX_indirect.so.0"

Start = Callable[[Path], AbstractContextManager[Bundle]]


@pytest.fixture
def gpuhook(installation: Installation, configs: dict[str, Path]) -> Gpuhook:
    return Gpuhook(installation, {"GPUHOOK_CONFIG": str(configs["runc"])})


@pytest.fixture(scope="session")
def gpuhook_before(installation: Installation, workspace: Path) -> Gpuhook:
    """A gpuhook that was configured before the driver's update."""
    driver = simulate(installation, workspace / "older-driver", f"--driver-version={OLDER}")
    config = write_config(workspace / "configs/older", driver.root, ["runc"])
    return Gpuhook(installation, {"GPUHOOK_CONFIG": str(config)})


@pytest.fixture
def start(workspace: Path, host: Namespace) -> Start:
    return partial(bundles.bundle, workspace / "bundles", namespace=host, runtime="runc")


@pytest.fixture
def root(request: pytest.FixtureRequest, roots: dict[str, Path], releases: dict[str, Path]) -> Path:
    return {**roots, **releases}[request.param]


@pytest.fixture
def bundle(root: Path, start: Start) -> Iterator[Bundle]:
    """A bundle with a distribution's root and dlprobe, whose container gets every library."""
    with start(root) as made:
        if not (made.root / "usr/local/bin/dlprobe").exists():
            distributions.add_probe(made.root)
        made.environ(*EVERYTHING)
        yield made


def rebuild_cache(root: Path, operations: list[Operation]) -> None:
    """Copy the driver's files to their mount points, and run a full ldconfig.

    ldconfig also makes its links again; links that it wouldn't make stay.
    """
    for op in operations:
        place = root / op.get("destination", "/").lstrip("/")
        if ".so." not in place.name:
            continue
        if op["kind"] == "bind":
            place.unlink(missing_ok=True)  # the mount points are hard links to one file
            shutil.copy(op["source"], place)
        elif op["kind"] == "symlink" and place.name != NOT_LDCONFIGS:
            place.unlink()
    (root / CACHE).unlink()
    for _ in range(2):  # the second run sees links to links that the first made
        run(["ldconfig", "-r", root]).ok()


@GLIBC
def test_the_loader_cache_agrees_with_a_full_ldconfig(bundle: Bundle, gpuhook: Gpuhook) -> None:
    operations = gpuhook.operations(bundle)
    names = names_in_cache(operations)
    probe = " ".join(["dlprobe", *names])
    done = gpuhook.run(bundle, *script("ldconfig -p", probe)).ok()
    cache, found = parts(done)
    hosts = hosts_libraries(operations)
    assert probed(found) == {name: hosts[name] for name in names}
    merged = listed(cache, bundle.root)
    assert len(set(merged)) == len(merged)

    rebuild_cache(bundle.root, operations)
    printed = run(["chroot", bundle.root, "ldconfig", "-p"]).ok().stdout.splitlines()
    assert merged == listed(printed, bundle.root)
    links = [op for op in operations if op["kind"] == "symlink" and "/lib" in op["destination"]]
    assert links
    for op in links:
        assert str((bundle.root / op["destination"][1:]).readlink()) == op["target"]


@GLIBC
def test_an_ldconfig_run_inside_changes_nothing(bundle: Bundle, gpuhook: Gpuhook) -> None:
    probe = " ".join(["dlprobe", *names_in_cache(gpuhook.operations(bundle))])
    commands = script("ldconfig -p", probe, "ldconfig", "ldconfig -p", probe)
    cache, found, said, cache_after, found_after = parts(gpuhook.run(bundle, *commands).ok())
    assert said == []
    assert listed(cache_after, bundle.root) == listed(cache, bundle.root)
    assert found_after == found
    assert "-" not in {line.split()[1] for line in found}


def add_own_folders(root: Path) -> None:
    """Add two folders whose order in ld.so.conf.d matters, and a separate libcuda, to an image."""
    for folder, libraries in {"b": ["libown.so.1", "libcuda.so.1"], "a": ["libown.so.1"]}.items():
        (root / "opt" / folder).mkdir(parents=True)
        for name in libraries:
            options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}"]
            target = root / "opt" / folder / name
            run(["gcc", *options, "-x", "c", "-o", target, "-"], stdin=b"int own;").ok()
    libc = next(root.glob("usr/lib*/**/libc.so.6"), None) or next(root.glob("lib/**/libc.so.6"))
    shutil.copy(libc, root / "opt/b/libc.so.6")
    lines = ["include /etc/ld.so.conf.d/*.conf", *(root / "etc/ld.so.conf").read_text().split("\n")]
    (root / "etc/ld.so.conf").write_text("\n".join(dict.fromkeys(lines)))
    (root / "etc/ld.so.conf.d").mkdir(exist_ok=True)
    (root / "etc/ld.so.conf.d/00-b.conf").write_text("/opt/b\n")
    (root / "etc/ld.so.conf.d/01-a.conf").write_text("/opt/a\n")
    run(["ldconfig", "-r", root]).ok()


@GLIBC
def test_the_images_own_loader_order_is_kept(bundle: Bundle, gpuhook: Gpuhook) -> None:
    add_own_folders(bundle.root)
    names = names_in_cache(gpuhook.operations(bundle))
    bundle.command("ldconfig", "-p")
    before = listed(bundle.run("runc").ok().stdout.splitlines(), bundle.root)
    probe = "dlprobe libown.so.1 libc.so.6 libcuda.so.1"
    cache, found = parts(gpuhook.run(bundle, *script("ldconfig -p", probe)))
    after = listed(cache, bundle.root)

    assert [entry for entry in after if entry[0] not in names] == [
        entry for entry in before if entry[0] not in names
    ]
    assert [path for name, _, path in after if name == "libown.so.1"] == [
        "/opt/b/libown.so.1",
        "/opt/a/libown.so.1",
    ]
    assert next(path for name, _, path in after if name == "libc.so.6") == "/opt/b/libc.so.6"
    assert found[0].split()[1] == "/opt/b/libown.so.1"
    hosts = hosts_libraries(gpuhook.operations(bundle))
    assert probed(found)["libcuda.so.1"] == hosts["libcuda.so.1"]


@DEBIANS
def test_an_image_without_cache_and_configuration_finds_the_libraries(
    bundle: Bundle, gpuhook: Gpuhook
) -> None:
    (bundle.root / CACHE).unlink()
    (bundle.root / "etc/ld.so.conf").unlink()
    operations = gpuhook.operations(bundle)
    names = names_in_cache(operations)
    found = probed(gpuhook.run(bundle, "dlprobe", *names).ok().stdout.splitlines())
    hosts = hosts_libraries(operations)
    assert found == {name: hosts[name] for name in names}


@GLIBC
def test_a_damaged_cache_is_refused(bundle: Bundle, gpuhook: Gpuhook) -> None:
    cache = bundle.root / CACHE
    damaged = cache.read_bytes()[:-100]
    cache.write_bytes(damaged)
    with nothing_left(bundle.root):
        failed = gpuhook.run(bundle, "true").failed()
    assert "/etc/ld.so.cache is damaged or not a loader cache" in failed.stderr
    assert "Run ldconfig in the image" in failed.stderr
    assert cache.read_bytes() == damaged


@GLIBC
def test_placeholders_of_an_older_driver_do_not_affect_the_loader(
    bundle: Bundle, gpuhook: Gpuhook, gpuhook_before: Gpuhook
) -> None:
    gpuhook_before.run(bundle, "true").ok()
    left = list(bundle.root.glob(f"usr/lib*/**/*.so.{OLDER}"))
    assert left
    assert {path.stat().st_size for path in left} == {0}
    operations = gpuhook.operations(bundle)
    names = names_in_cache(operations)
    probe = " ".join(["dlprobe", *names])
    commands = script("ldconfig -p", probe, "ldconfig", "ldconfig -p", probe)
    cache, found, _, cache_after, found_after = parts(gpuhook.run(bundle, *commands).ok())
    hosts = hosts_libraries(operations)
    assert probed(found) == probed(found_after) == {name: hosts[name] for name in names}
    gone = set(listed(cache, bundle.root)) - set(listed(cache_after, bundle.root))
    assert {name for name, _, _ in gone} <= {path.name for path in left}


@pytest.fixture
def distroless(
    request: pytest.FixtureRequest, workspace: Path, roots: dict[str, Path], start: Start
) -> Iterator[Bundle]:
    probes = [roots["debian"] / "usr/local/bin" / name for name in ("dlprobe", "devopen")]
    folder = workspace / f"distroless-{request.node.name}"
    root = distributions.build_distroless(folder, probes, debian=request.param)
    with start(root) as made:
        made.environ(*EVERYTHING)
        yield made


@pytest.mark.parametrize("distroless", [True, False], indirect=True, ids=["debian", "unknown"])
def test_a_distroless_image_finds_libraries_and_gpus(
    distroless: Bundle, gpuhook: Gpuhook, driver: Driver
) -> None:
    operations = gpuhook.operations(distroless)
    names = names_in_cache(operations)
    assert not (distroless.root / CACHE).exists()
    found = gpuhook.run(distroless, "dlprobe", *names).ok().stdout.splitlines()
    hosts = hosts_libraries(operations)
    assert probed(found) == {name: hosts[name] for name in names}
    smi = gpuhook.run(distroless, "nvidia-smi", "-L").ok()
    assert smi.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    node = f"/dev/nvidia{driver.gpus[0].minor}"
    assert gpuhook.run(distroless, "devopen", node).ok().stdout == f"{node} ENXIO\n"


def test_a_musl_image_loads_usable_libraries_without_a_cache(
    workspace: Path, start: Start, gpuhook: Gpuhook
) -> None:
    with start(distributions.build_musl(workspace / "musl")) as bundle:
        bundle.environ(*EVERYTHING)
        operations = gpuhook.operations(bundle)
        assert names_in_cache(operations) == []
        hosts = hosts_libraries(operations)
        done = gpuhook.run(bundle, "dlprobe", *hosts)
        assert not (bundle.root / CACHE).exists()
    # libcuda needs glibc's own loader, which images have with Alpine's gcompat. The loader reports
    # that this is missing, so it has found the library.
    unusable = [name for name in hosts if name.startswith("libcuda.so")]
    loaded = {name: hosts[name] for name in hosts if name not in unusable}
    found = probed(done.stdout.splitlines())
    assert {name: found[name] for name in loaded} == loaded
    for name in unusable:
        assert found[name].endswith(f"(needed by /usr/lib/{name})")
    assert "libnvidia-ml.so.1" in loaded
