"""Checks of a node of a Kubernetes cluster: its device plugins, and the engine's plugin."""

from collections.abc import Iterator
from importlib.util import find_spec

from gpuhook.cluster.nri.transport import PROCESS, SOCKET
from gpuhook.tools.doctor import engines
from gpuhook.tools.doctor.case import Case, CheckStep
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning

_CHECK = "device-plugin"
_NRI, _GATE = "nri", "gate"
_FOLDER = "/var/lib/kubelet/device-plugins"
_REGISTRY = "kubelet.sock"
_SERVER = "gpuhook-server"  # the process name of the plugin's server (kubelet_endpoint)
_UNIT = "/etc/systemd/system/gpuhook-nri.service"  # as in the page and the installer


def device_plugin(case: Case) -> Iterator[Finding]:
    """Check for a device plugin, if there is a kubelet."""
    sockets = [name for name in case.machine.names(_FOLDER) if name.endswith(".sock")]
    if not sockets:
        return
    ours = [name for name in sockets if name.startswith("gpuhook-")]
    others = [name for name in sockets if name.startswith("nvidia-")]
    runs = bool(case.machine.processes(_SERVER))
    if others and (ours or runs):
        yield warning(
            _CHECK,
            f"NVIDIA's device plugin ({_FOLDER}/{others[0]}) serves this kubelet, too, "
            "and it heeds whichever registers last",
            "Remove NVIDIA's plugin from this node, or don't run gpuhook's there; a socket that "
            "no process serves goes away when the kubelet is restarted",
        )
    if runs and not ours and _REGISTRY in sockets:
        yield warning(
            _CHECK,
            f"gpuhook's device plugin runs, and has no socket in {_FOLDER}",
            "Look at its log; in a pod, mount this folder at the same place",
        )
    elif ours:
        ending = "" if len(ours) == 1 else "s"
        yield ok(_CHECK, f"gpuhook's device plugin serves {len(ours)} resource{ending}")
    elif others and not runs:
        yield ok(
            _CHECK,
            f"NVIDIA's device plugin ({_FOLDER}/{others[0]}) serves this kubelet, and gpu-py gives "
            "containers what it says",
        )
    elif not runs:
        extra = "" if _has_extra() else "the Python packages grpcio and protobuf, and "
        yield note(
            _CHECK,
            "A kubelet runs here, and no device plugin of gpuhook's or NVIDIA's",
            f"For a cluster's pods to get devices: {extra}gpuhook device-plugin",
        )


def engines_plugin(case: Case) -> Iterator[Finding]:
    """Check that `gpuhook nri` runs if configured: without it pods start without devices."""
    machine = case.machine
    yield from _gate(case)
    if machine.processes(PROCESS):
        if machine.exists(SOCKET):
            yield ok(_NRI, "gpuhook nri runs, and the engine asks plugins")
        else:
            yield warning(
                _NRI,
                f"gpuhook nri runs, and no engine here asks plugins: {SOCKET} isn't there",
                "Turn NRI on in the engine's configuration (docs/kubernetes/nri.md)",
            )
    elif case.config.gate:
        yield failure(
            _NRI,
            "This node has a gate (gate = true in [gpuhook]), and gpuhook nri doesn't run: gpu-py "
            "gives no container a device",
            "Start it (systemctl start gpuhook-nri), or set gate = false in [gpuhook]",
        )
    elif machine.exists(_UNIT):
        yield warning(
            _NRI,
            f"{_UNIT} is there, and gpuhook nri doesn't run: pods start without their devices",
            "Look at `systemctl status gpuhook-nri`; docs/kubernetes/nri.md says how an engine is "
            "told to start nothing without it",
        )


def _gate(case: Case) -> Iterator[Finding]:
    """Report whatever bypasses the gate."""
    if case.config_error:
        return
    unit = case.machine.text(_UNIT) or ""
    if "--gate" in unit and not case.config.gate:  # protects: doctor-gate
        yield warning(
            _GATE,
            f"{_UNIT} has a gate, and config.toml has none: gpu-py gives what a container asks for "
            "while gpuhook nri doesn't run",
            "Set gate = true in [gpuhook]: gpuhook config set gpuhook.gate=true",
        )
    others = dict(engines.others_runtimes(case)) if case.config.gate else {}
    if others:
        name, program = next(iter(others.items()))
        yield warning(
            _GATE,
            f"This node has a gate, and pods may name the runtime {name} ({program}), which knows "
            "nothing of it: while gpuhook nri doesn't run, it gives what a container asks for",
            "Remove that runtime from the engine's configuration, or have gpu-py in its place",
        )


def _has_extra() -> bool:
    try:
        return find_spec("grpc") is not None and find_spec("google.protobuf") is not None
    except ModuleNotFoundError:
        return False


STEPS = (CheckStep(device_plugin), CheckStep(engines_plugin))
