"""GPUs in PCI domains above 16 bits, which the kernel writes with as many digits as needed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import cdi, metrics
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver, driver_in
from harness.installation import Installation, write_config
from harness.prefork import ONE, RUNTIMES

BUILD = """
import dataclasses, sys
from gpuhook_simulate.vendors.nvidia import Options, build, machine
make, domain = machine._make_gpu, int(sys.argv[2], 16)
machine._make_gpu = lambda *about: dataclasses.replace(make(*about), domain=domain)
build(Options(root=sys.argv[1], gpus=2))
"""
LOOK = "cd /dev/dri/by-path && for link in *; do busybox readlink $link; echo $link; done"
ALL = "NVIDIA_DRIVER_CAPABILITIES=all"


@pytest.fixture(scope="module", params=["10000", "3f8cfdd"])
def far(
    request: pytest.FixtureRequest, installation: Installation, workspace: Path
) -> Iterator[tuple[str, Driver]]:
    """A simulated machine whose GPUs are in such a domain, as with Intel's VMD and Hyper-V."""
    root = workspace / f"domain-{request.param}"
    python = installation.bin / "python"
    run([python, "-c", BUILD, root, request.param]).ok()
    yield request.param, driver_in(root)
    run([installation.command, "simulate", "--remove", root]).ok()


def links(domain: str, stdout: str) -> bool:
    words = stdout.split()
    given = dict(zip(words[1::2], words[::2], strict=True))
    return given == {
        f"pci-{domain}:43:00.0-card": "../card1",
        f"pci-{domain}:43:00.0-render": "../renderD129",
    }


@RUNTIMES
def test_a_container_gets_gpus_of_a_high_pci_domain(
    bundle: Bundle, installation: Installation, far: tuple[str, Driver]
) -> None:
    domain, driver = far
    config = write_config(bundle.path / "etc", driver.root, [bundle.runtime])
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1", ALL)
    bundle.command("sh", "-c", LOOK)
    done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}).ok()
    assert links(domain, done.stdout), done.stdout


@RUNTIMES
def test_a_cdi_spec_gives_gpus_of_a_high_pci_domain(
    bundle: Bundle, installation: Installation, far: tuple[str, Driver]
) -> None:
    domain, driver = far
    config = write_config(bundle.path / "etc", driver.root, [bundle.runtime])
    (bundle.path / "cdi").mkdir()
    cdi.give(bundle, cdi.generate(installation, config, bundle.path / "cdi"), "1")
    bundle.command("sh", "-c", LOOK)
    done = bundle.run(bundle.runtime).ok()
    assert links(domain, done.stdout), done.stdout


@ONE
def test_commands_show_long_pci_domains(
    bundle: Bundle, installation: Installation, far: tuple[str, Driver]
) -> None:
    domain, driver = far
    config = write_config(bundle.path / "etc", driver.root, [bundle.runtime])
    places = [f"{domain}:1b:00.0", f"{domain}:43:00.0"]

    def ask(*words: str) -> str:
        return run([installation.command, *words, "--config", config]).ok().stdout

    explained = json.loads(
        ask("explain", "-e", f"NVIDIA_VISIBLE_DEVICES={places[1]}", "--format=json")
    )
    [visible] = [op["visible"] for op in explained["operations"] if op["kind"] == "proc-driver"]
    assert [each for each in visible if each.startswith("gpus/")] == [f"gpus/{places[1]}"]
    published = ask("dra", "--dry-run")
    assert all(f'string: "{place}"' in published for place in places), published
    assert f'string: "pci{domain}:00"' in published
    file = bundle.path / "metrics.prom"
    run([*metrics.COMMAND, "--textfile", file, "--config", config]).ok()
    shown = file.read_text()
    assert all(f'bus_id="{place}"' in shown for place in places), shown
