"""A cache from the host's ldconfig for an image with a damaged cache, and no other change."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import bundles
from harness.bundles import Bundle, Spec
from harness.commands import run
from harness.driver import Driver
from harness.images import PROBES
from harness.installation import Installation, write_config
from harness.loader import (
    CACHE,
    Gpuhook,
    hosts_libraries,
    listed,
    names_in_cache,
    parts,
    probed,
    script,
)
from harness.namespaces import Namespace
from harness.snapshot import nothing_left

from gpuhook.base.loader import ldcache

MAPPED = 100_000
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda cache: cache[:-100],
    "empty header": lambda _: ldcache.NEW_MAGIC,
    "text": lambda _: b"not a cache at all\n" * 100,
    "out of bounds": lambda cache: cache[:48] + b"\xff" * 24 + cache[72:],
}

Configure = Callable[..., Gpuhook]


@pytest.fixture
def configure(installation: Installation, driver: Driver, tmp_path: Path) -> Configure:
    """A function that returns gpuhook with the fallback on and with a given ldconfig."""

    def make(ldconfig: str | Path = "/sbin/ldconfig") -> Gpuhook:
        config = write_config(tmp_path / "config", driver.root, ["runc"])
        text = config.read_text().replace("[gpuhook]\n", "[gpuhook]\nldconfig-fallback = true\n")
        cli = f'[nvidia-container-cli]\nldconfig = "@{ldconfig}"\n'
        config.write_text(text.replace("[nvidia-container-cli]\n", cli))
        return Gpuhook(installation, {"GPUHOOK_CONFIG": str(config)})

    return make


@pytest.fixture
def bundle(workspace: Path, roots: dict[str, Path], host: Namespace) -> Iterator[Bundle]:
    with bundles.bundle(workspace / "bundles", roots["debian"], host, "runc") as made:
        made.environ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")
        yield made


def damage(bundle: Bundle, how: str = "text") -> bytes:
    cache = bundle.root / CACHE
    cache.write_bytes(DAMAGED[how](cache.read_bytes()))
    return cache.read_bytes()


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_cache_is_recreated(bundle: Bundle, configure: Configure, how: str) -> None:
    gpuhook = configure()
    before = listed(
        run(["chroot", bundle.root, "ldconfig", "-p"]).ok().stdout.split("\n"), bundle.root
    )
    damage(bundle, how)
    operations = gpuhook.operations(bundle)
    names = names_in_cache(operations)
    probe = " ".join(["dlprobe", *names])
    cache, found = parts(gpuhook.run(bundle, *script("ldconfig -p", probe)).ok())
    hosts = hosts_libraries(operations)
    assert probed(found) == {name: hosts[name] for name in names}
    after = listed(cache, bundle.root)
    assert [entry for entry in after if entry[0] not in names] == before
    status = (bundle.root / CACHE).stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o644, 0, 0)


@pytest.fixture
def shut_in(tmp_path: Path) -> Path:
    program = tmp_path / "shutin"
    run(["gcc", "-O1", "-Wall", "-Werror", "-static", "-o", program, PROBES / "shutin.c"]).ok()
    return program


def test_ldconfig_runs_confined(bundle: Bundle, configure: Configure, shut_in: Path) -> None:
    damaged = damage(bundle)
    gpuhook = configure(shut_in)
    with nothing_left(bundle.root):
        failed = gpuhook.run(bundle, "true").failed()
    assert (
        "the host's ldconfig can't create a new one: it exited with status 3 (uid=0/0 pid=1 caps=0 "
        "bounding=0 nnp=1 env=0 fds=3 etc=EROFS dev=OK proc=0 sys=0 net=1 exec=EACCES cpu=10 "
        "as=2048 nofile=64 fsize=16)"
    ) in failed.stderr
    assert (bundle.root / CACHE).read_bytes() == damaged


def own_user_namespace(spec: Spec) -> None:
    spec["linux"]["namespaces"].append({"type": "user"})
    mapping = [{"containerID": 0, "hostID": MAPPED, "size": 65536}]
    spec["linux"].update(uidMappings=mapping, gidMappings=mapping)


def test_in_a_user_namespace_ldconfig_runs_as_the_containers_root(
    bundle: Bundle, configure: Configure, shut_in: Path
) -> None:
    bundle.change(own_user_namespace)
    run(["chown", "-hR", f"{MAPPED}:{MAPPED}", bundle.root]).ok()
    damage(bundle)
    failed = configure(shut_in).run(bundle, "true").failed()
    assert f"(uid={MAPPED}/{MAPPED} pid=1 caps=0 " in failed.stderr


def test_a_cache_made_in_a_user_namespace_belongs_to_its_root(
    bundle: Bundle, configure: Configure
) -> None:
    bundle.change(own_user_namespace)
    run(["chown", "-hR", f"{MAPPED}:{MAPPED}", bundle.root]).ok()
    damage(bundle)
    configure().run(bundle, "dlprobe", "libcuda.so.1", "libm.so.6").ok()
    assert (bundle.root / CACHE).stat().st_uid == MAPPED


def test_nothing_outside_the_image_is_read(
    bundle: Bundle, configure: Configure, workspace: Path
) -> None:
    outside = workspace / "outside"
    outside.mkdir()
    options = ["-shared", "-nostdlib", "-Wl,-soname,libsecret.so.1", "-x", "c"]
    run(["gcc", *options, "-o", outside / "libsecret.so.1", "-"], stdin=b"int own;").ok()
    links = [str(outside), f"/proc/1/root{outside}", f"/proc/self/cwd{outside}"]
    links += ["../" * 20 + str(outside).lstrip("/"), f"/dev/fd/3{outside}"]
    folders = []
    for at, target in enumerate(links):
        (bundle.root / f"opt{at}").symlink_to(target)
        folders += [f"/opt{at}", target]
    lines = "\n".join(folders)
    (bundle.root / "etc/ld.so.conf").write_text(f"{lines}\ninclude /proc/1/root/etc/*.conf\n")
    damage(bundle)
    with nothing_left(outside):
        done = configure().run(bundle, "ldconfig", "-p").ok()
    assert "libcuda.so.1" in done.stdout
    assert "libsecret" not in done.stdout
    assert str(outside) not in done.stdout


def test_the_images_own_ldconfig_is_not_run(bundle: Bundle, configure: Configure) -> None:
    for name in ("ldconfig", "ldconfig.real"):
        program = bundle.root / "usr/sbin" / name
        program.unlink(missing_ok=True)
        program.write_text("#!/bin/sh\ntouch /ran\n")
        program.chmod(0o755)
    damage(bundle)
    configure().run(bundle, "dlprobe", "libcuda.so.1").ok()
    assert not (bundle.root / "ran").exists()


def test_a_hanging_ldconfig_is_ended_after_a_timeout(bundle: Bundle, configure: Configure) -> None:
    (bundle.root / "etc/ld.so.conf").unlink()
    os.mkfifo(bundle.root / "etc/ld.so.conf")
    damaged = damage(bundle)
    with nothing_left(bundle.root):
        failed = configure().run(bundle, "true").failed()
    assert "can't create a new one: it took more than 10 seconds" in failed.stderr
    assert (bundle.root / CACHE).read_bytes() == damaged


def test_a_dynamically_linked_ldconfig_is_refused(bundle: Bundle, configure: Configure) -> None:
    damage(bundle)
    failed = configure("/usr/bin/env").run(bundle, "true").failed()
    assert "The host's ldconfig /usr/bin/env can't be used: it is not statically" in failed.stderr


def test_a_healthy_cache_needs_no_program(
    bundle: Bundle, configure: Configure, shut_in: Path
) -> None:
    configure(shut_in).run(bundle, "dlprobe", "libcuda.so.1").ok()
