"""The messages between an engine and its plugin: the used part of NRI v1alpha1.

From containerd/nri, pkg/api/api.proto, and containerd/ttrpc, request.proto, as tables.
"""

from gpuhook.monitor.kubelet_api import Table, classes

_NRI: Table = {
    "Empty": {},
    "RegisterPluginRequest": {"plugin_name": (1, "string"), "plugin_idx": (2, "string")},
    "ConfigureRequest": {
        "config": (1, "string"), "runtime_name": (2, "string"), "runtime_version": (3, "string"),
    },
    "ConfigureResponse": {"events": (2, "int32")},
    "SynchronizeRequest": {"more": (3, "bool")},
    "SynchronizeResponse": {"more": (2, "bool")},
    "CreateContainerRequest": {"pod": (1, "PodSandbox"), "container": (2, "Container")},
    "CreateContainerResponse": {"adjust": (1, "ContainerAdjustment")},
    "PodSandbox": {
        "id": (1, "string"), "name": (2, "string"), "uid": (3, "string"),
        "namespace": (4, "string"), "annotations": (6, "map"), "runtime_handler": (7, "string"),
    },
    "Container": {
        "id": (1, "string"), "name": (3, "string"), "annotations": (6, "map"),
        "env": (8, "*string"), "mounts": (9, "*Mount"), "rlimits": (13, "*POSIXRlimit"),
    },
    "Mount": {
        "destination": (1, "string"), "type": (2, "string"), "source": (3, "string"),
        "options": (4, "*string"),
    },
    "OptionalInt": {"value": (1, "int64")},
    "OptionalUInt32": {"value": (1, "uint32")},
    "Hook": {
        "path": (1, "string"), "args": (2, "*string"), "env": (3, "*string"),
        "timeout": (4, "OptionalInt"),
    },
    "Hooks": {"create_container": (3, "*Hook")},
    "LinuxDevice": {
        "path": (1, "string"), "type": (2, "string"), "major": (3, "int64"), "minor": (4, "int64"),
        "file_mode": (5, "OptionalUInt32"), "uid": (6, "OptionalUInt32"),
        "gid": (7, "OptionalUInt32"),
    },
    "LinuxContainerAdjustment": {"devices": (1, "*LinuxDevice")},
    "KeyValue": {"key": (1, "string"), "value": (2, "string")},
    "CDIDevice": {"name": (1, "string")},
    "POSIXRlimit": {"type": (1, "string"), "hard": (2, "uint64"), "soft": (3, "uint64")},
    "ContainerAdjustment": {
        "mounts": (3, "*Mount"), "env": (4, "*KeyValue"), "hooks": (5, "Hooks"),
        "linux": (6, "LinuxContainerAdjustment"), "rlimits": (7, "*POSIXRlimit"),
        "CDI_devices": (8, "*CDIDevice"),
    },
}  # fmt: skip
_TTRPC: Table = {
    "Request": {
        "service": (1, "string"), "method": (2, "string"), "payload": (3, "bytes"),
        "timeout_nano": (4, "int64"),
    },
    "Status": {"code": (1, "int32"), "message": (2, "string")},
    "Response": {"status": (1, "Status"), "payload": (2, "bytes")},
}  # fmt: skip

nri = classes("gpuhook.nri", _NRI)
ttrpc = classes("gpuhook.ttrpc", _TTRPC)
