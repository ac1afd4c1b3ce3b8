"""Simulated driver roots with plain files as device nodes, so that tests don't need root."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_program import LIBRARY_DIR

from gpuhook_simulate.place import MARKER
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import Options, driver, state, tables
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine, make_machine
from gpuhook_simulate.vendors.nvidia.options import Failure


@pytest.fixture(scope="session")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[SimulatedMachine, Failure | None], Path]:
    """A function that compiles a machine's driver, only once for each machine."""
    if shutil.which("gcc") is None:
        pytest.skip("the simulated driver is compiled with gcc when it is built")
    done: dict[str, Path] = {}

    def compile_once(machine: SimulatedMachine, failure: Failure | None) -> Path:
        header = tables.generated_header(machine, failure, LIBRARY_DIR)
        source = tables.generated_source(machine)
        folder = done.get(header + source)
        if folder is None:
            folder = done[header + source] = tmp_path_factory.mktemp("compiled")
            (folder / "generated.h").write_text(header)
            (folder / "generated.c").write_text(source)
            driver.compile_driver(str(folder), compat32=False)
        return folder

    return compile_once


@pytest.fixture
def make_root(
    tmp_path: Path, compiled: Callable[[SimulatedMachine, Failure | None], Path]
) -> Callable[..., tuple[Path, SimulatedMachine]]:
    """A function that makes a driver root, with plain files as nodes."""

    def make(**fields: Any) -> tuple[Path, SimulatedMachine]:
        options = Options(root=str(tmp_path / "root"), **fields)
        machine = make_machine(options)
        folder = str(compiled(machine, fields.get("failure")))
        root = tmp_path / "root"
        tree = Tree(str(root))
        driver.install_main_libraries(tree, folder, machine.driver_version, LIBRARY_DIR)
        driver.install_probes(tree, folder)
        tree.text(MARKER, "")
        built = state.BuildState(options, machine.driver_version, LIBRARY_DIR)
        state.make(tree, built, machine)
        for name in ("nvidiactl", "nvidia-uvm"):
            tree.text(f"dev/{name}", "")
        for gpu in machine.gpus:
            tree.text(f"dev/nvidia{gpu.minor}", "")
            for mig in gpu.migs:
                tree.text(f"dev/nvidia-caps/nvidia-cap{mig.gi_cap}", "")
                tree.text(f"dev/nvidia-caps/nvidia-cap{mig.ci_cap}", "")
        return root, machine

    return make
