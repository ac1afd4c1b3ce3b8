"""The driver's other files: names, SONAMEs and folders, with some for every capability."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StockLibrary:
    """A driver library without content.

    ``soname`` is the number in the SONAME, None if the SONAME has the driver's whole
    version; ``folder`` is below the library folder. The file of an ``unversioned`` library has the
    SONAME as its name.
    """

    name: str
    soname: str | None
    folder: str = ""
    unversioned: bool = False

    def file_name(self, version: str) -> str:
        """Return the file's name for a driver version."""
        return self.soname_of(version) if self.unversioned else f"{self.name}.so.{version}"

    def soname_of(self, version: str) -> str:
        """Return the DT_SONAME for a driver version."""
        return f"{self.name}.so.{self.soname or version}"


LIBRARIES = (
    # utility
    StockLibrary("libnvidia-cfg", "1"),
    # compute
    StockLibrary("libcudadebugger", "1"),
    StockLibrary("libnvidia-allocator", "1"),
    StockLibrary("libnvidia-gpucomp", None),
    StockLibrary("libnvidia-nvvm", "4"),
    StockLibrary("libnvidia-nvvm70", "4", unversioned=True),
    StockLibrary("libnvidia-opencl", "1"),
    StockLibrary("libnvidia-pkcs11-openssl3", None),
    StockLibrary("libnvidia-ptxjitcompiler", "1"),
    # video
    StockLibrary("libnvcuvid", "1"),
    StockLibrary("libnvidia-encode", "1"),
    StockLibrary("libnvidia-opticalflow", "1"),
    StockLibrary("libvdpau_nvidia", "1", "vdpau"),
    # graphics
    StockLibrary("libEGL_nvidia", "0"),
    StockLibrary("libGLESv1_CM_nvidia", "1"),
    StockLibrary("libGLESv2_nvidia", "2"),
    StockLibrary("libGLX_nvidia", "0"),
    StockLibrary("libnvidia-eglcore", None),
    StockLibrary("libnvidia-fbc", "1"),
    StockLibrary("libnvidia-glcore", None),
    StockLibrary("libnvidia-glsi", None),
    StockLibrary("libnvidia-glvkspirv", None),
    StockLibrary("libnvidia-rtcore", None),
    StockLibrary("libnvidia-tls", None),
    StockLibrary("libnvoptix", "1"),
    # ngx
    StockLibrary("libnvidia-ngx", "1"),
    StockLibrary("libnvidia-egl-gbm", "1"),
    StockLibrary("libnvidia-egl-wayland", "1"),
    # This library belongs to no capability.
    StockLibrary("libnvidia-sandboxutils", "1"),
)

MPS_CONTROL = "nvidia-cuda-mps-control"
# Programs that only print their name; nvidia-smi and the MPS daemon do more, and aren't listed.
PROGRAMS = (
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
)

_VENDOR_JSON = '{{\n    "file_format_version": "1.0.0",\n    "ICD": {{\n{body}\n    }}\n}}\n'


def text_files(version: str, library_dir: str) -> dict[str, str]:
    """Return the configuration files for graphics and OpenCL: path below the root -> content."""
    egl = _VENDOR_JSON.format(body='        "library_path": "libEGL_nvidia.so.0"')
    vulkan = _VENDOR_JSON.format(
        body='        "library_path": "libGLX_nvidia.so.0",\n        "api_version": "1.4.312"'
    )
    platforms = "usr/share/egl/egl_external_platform.d"
    return {
        "etc/OpenCL/vendors/nvidia.icd": "libnvidia-opencl.so.1\n",
        "etc/vulkan/icd.d/nvidia_icd.json": vulkan,
        "etc/vulkan/implicit_layer.d/nvidia_layers.json": _LAYERS,
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json": egl,
        f"{platforms}/10_nvidia_wayland.json": _VENDOR_JSON.format(
            body='        "library_path": "libnvidia-egl-wayland.so.1"'
        ),
        f"{platforms}/15_nvidia_gbm.json": _VENDOR_JSON.format(
            body='        "library_path": "libnvidia-egl-gbm.so.1"'
        ),
        "usr/share/X11/xorg.conf.d/10-nvidia.conf": _XORG.format(library_dir=library_dir),
        "usr/share/nvidia/nvoptix.bin": "simulated by gpuhook\n",
        f"usr/share/nvidia/nvidia-application-profiles-{version}-rc": '{"rules": []}\n',
    }


_LAYERS = """\
{
    "file_format_version": "1.0.0",
    "layer": {
        "name": "VK_LAYER_NV_optimus",
        "type": "INSTANCE",
        "library_path": "libGLX_nvidia.so.0",
        "api_version": "1.4.312",
        "implementation_version": "1",
        "description": "Simulated by gpuhook",
        "enable_environment": {"__NV_PRIME_RENDER_OFFLOAD": "1"},
        "disable_environment": {"DISABLE_LAYER_NV_OPTIMUS_1": ""}
    }
}
"""

_XORG = """\
Section "OutputClass"
    Identifier "nvidia"
    MatchDriver "nvidia-drm"
    Driver "nvidia"
    ModulePath "{library_dir}/nvidia/xorg"
EndSection
"""
