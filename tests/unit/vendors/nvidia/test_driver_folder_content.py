"""Content of a driver folder, for inventories built by hand."""

import own
import pytest
from machines import VERSION, gpu, library, machine

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverFolderError, RequestError
from gpuhook.core.inventory.model import DriverFile
from gpuhook.tools.vendors.nvidia.driver_folder import FOLDERS, content_of
from gpuhook.vendors.nvidia.model import WSL


def test_files_are_placed_where_cuda_images_search() -> None:
    found = content_of(Config(), machine(gpu(0, 1)))
    assert found.version == VERSION
    assert found.files[f"lib64/libcuda.so.{VERSION}"] == f"{own.FOLDER}/libcuda.so.{VERSION}"
    assert found.files[f"lib/libcuda.so.{VERSION}"] == f"{own.FOLDER32}/libcuda.so.{VERSION}"
    assert found.files["bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    assert {name.partition("/")[0] for name in found.files} == set(FOLDERS)


def test_the_folder_has_the_same_links_as_a_container() -> None:
    links = content_of(Config(), machine()).links
    assert links["lib64/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert links["lib/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert links["lib64/libcuda.so"] == "libcuda.so.1"
    assert links["lib64/libGLX_indirect.so.0"] == f"libGLX_nvidia.so.{VERSION}"
    assert links["lib64/gbm/nvidia-drm_gbm.so"] == "../libnvidia-allocator.so.1"
    assert not [text for text in links.values() if text.startswith("/")]


def test_selected_capabilities_give_only_their_files() -> None:
    found = content_of(Config(), machine(), ["utility"])
    assert set(found.files) == {f"lib64/libnvidia-ml.so.{VERSION}", "bin/nvidia-smi"}
    assert found.links == {"lib64/libnvidia-ml.so.1": f"libnvidia-ml.so.{VERSION}"}
    whole = content_of(Config(), machine())
    assert content_of(Config(), machine(), ["all", "video"]) == whole


def test_capabilities_not_allowed_by_configuration_are_refused() -> None:
    config = Config()
    config.supported_driver_capabilities = "utility,compute"
    found = content_of(config, machine())
    assert f"lib64/libcuda.so.{VERSION}" in found.files
    assert f"lib64/libGLX_nvidia.so.{VERSION}" not in found.files
    with pytest.raises(RequestError, match="graphics"):
        content_of(config, machine(), ["graphics"])


def test_the_driver_folder_has_no_firmware_ipc_or_config_files() -> None:
    inventory = machine()
    places = {file.path for file in inventory.files if file.kind in ("firmware", "ipc", "config")}
    assert places
    assert not places & set(content_of(Config(), inventory).files.values())


def test_a_driver_folder_on_wsl_is_refused() -> None:
    inventory = machine().but(files=(library("libdxcore.so", "", None),))
    inventory.platform = WSL
    with pytest.raises(DriverFolderError, match="wsl"):
        content_of(Config(), inventory)


def test_nvidia_modprobe_is_left_out() -> None:
    """nvidia-modprobe is set-user-ID root, and no capability includes it."""
    extra = DriverFile("binary", "/usr/bin/nvidia-modprobe", "/usr/bin/nvidia-modprobe", "modprobe")
    inventory = machine()
    found = content_of(Config(), inventory.but(files=(*inventory.files, extra)))
    assert "bin/nvidia-modprobe" not in found.files
