"""The options of nvidia-container-cli 1.18 and of its commands.

Options with "no effect" in their text stand for something that gpuhook always or never does.
"""

from gpuhook.nvidia_cli.argp import OPTIONAL, VALUE, Option

# The version whose command lines are served. Scripts and enroot compare it with a minimum.
SERVED_VERSION = "1.18.0"

GLOBAL = (
    Option("debug", "d", VALUE, "Log debug information"),
    Option("load-kmods", "k", text="Load kernel modules"),
    Option("no-pivot", "n", text="No effect: nothing is pivoted"),
    Option("user", "u", OPTIONAL, "User and group to use for the driver"),
    Option("root", "r", VALUE, "Path to the driver root directory"),
    Option("ldcache", "l", VALUE, "Path to the system's DSO cache"),
    Option("no-create-imex-channels", text="No effect: no channels are created"),
)

INFO = (Option("csv", text="Output in CSV format"),)

_DRIVER = (
    Option("no-persistenced", text="Don't include the NVIDIA persistenced socket"),
    Option("no-fabricmanager", text="Don't include the NVIDIA fabricmanager socket"),
    Option("no-gsp-firmware", text="Don't include GSP Firmware"),
)

LIST = (
    Option("device", "d", VALUE, "Device UUID(s) or index(es) to list"),
    Option("libraries", "l", text="List driver libraries"),
    Option("binaries", "b", text="List driver binaries"),
    Option("ipcs", "i", text="List driver ipcs"),
    Option("firmwares", "f", text="List driver firmwares"),
    Option("compat32", text="List driver 32-bit libraries"),
    Option("mig-config", "", VALUE, "MIG devices to list config capabilities files for"),
    Option("mig-monitor", "", VALUE, "MIG devices to list monitor capabilities files for"),
    Option("imex-channel", "", VALUE, "IMEX channel(s) to list"),
    *_DRIVER,
)

CAPABILITIES = (
    Option("compute", "c", text="Enable compute capability"),
    Option("utility", "u", text="Enable utility capability"),
    Option("video", "v", text="Enable video capability"),
    Option("graphics", "g", text="Enable graphics capability"),
    Option("display", "D", text="Enable display capability"),
    Option("ngx", "n", text="Enable ngx capability"),
    Option("compat32", text="Enable 32-bit compatibility"),
)

CONFIGURE = (
    Option("pid", "p", VALUE, "Container PID"),
    Option("device", "d", VALUE, "Device UUID(s) or index(es) to isolate"),
    Option("require", "r", VALUE, "Check container requirements"),
    Option("ldconfig", "l", VALUE, "No effect: ld.so.cache is merged without it"),
    *CAPABILITIES,
    Option("mig-config", "", VALUE, "Enable configuration of MIG devices"),
    Option("mig-monitor", "", VALUE, "Enable monitoring of MIG devices"),
    Option("imex-channel", "", VALUE, "IMEX channel ID(s) to inject"),
    Option("no-cgroups", text="Don't use cgroup enforcement"),
    Option("no-devbind", text="Don't bind mount devices"),
    Option("no-cntlibs", text="Don't overwrite host libraries with container ones"),
    Option("cuda-compat-mode", "", VALUE, "mount, ldconfig or disabled"),
    *_DRIVER,
)
