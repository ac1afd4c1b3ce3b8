"""Messages of the kubelet's interfaces: device plugins (v1beta1) and PodResources (v1).

From k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto and pkg/apis/podresources/v1/api.proto,
written as tables. Those files use nothing that these tables can't express.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from gpuhook.base.errors import PluginError
from gpuhook.monitor import INSTALL

try:
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.internal import builder
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise PluginError(
        "The Python package protobuf isn't installed, and gpuhook needs it to talk to a kubelet",
        INSTALL,
    ) from error

__all__ = ["DecodeError", "Table", "classes", "plugin", "pod_resources"]

VERSION = "v1beta1"
REGISTRY = "kubelet.sock"  # in the folder of device plugins
REGISTER = "/v1beta1.Registration/Register"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"
LIST_POD_RESOURCES = "/v1.PodResourcesLister/List"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

# Message -> field -> its number and type. "*" is a repeated field, "?" an optional one, "map" a map
# of strings to strings, "map:NAME" a map of strings to messages.
Table = Mapping[str, Mapping[str, tuple[int, str]]]

_DEVICE_PLUGIN: Table = {
    "Empty": {},
    "DevicePluginOptions": {
        "pre_start_required": (1, "bool"),
        "get_preferred_allocation_available": (2, "bool"),
    },
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
        "options": (4, "DevicePluginOptions"),
    },
    "ListAndWatchResponse": {"devices": (1, "*Device")},
    "Device": {"ID": (1, "string"), "health": (2, "string"), "topology": (3, "TopologyInfo")},
    "TopologyInfo": {"nodes": (1, "*NUMANode")},
    "NUMANode": {"ID": (1, "int64")},
    "PreStartContainerRequest": {"devices_ids": (1, "*string")},
    "PreStartContainerResponse": {},
    "PreferredAllocationRequest": {
        "container_requests": (1, "*ContainerPreferredAllocationRequest"),
    },
    "ContainerPreferredAllocationRequest": {
        "available_deviceIDs": (1, "*string"),
        "must_include_deviceIDs": (2, "*string"),
        "allocation_size": (3, "int32"),
    },
    "PreferredAllocationResponse": {
        "container_responses": (1, "*ContainerPreferredAllocationResponse"),
    },
    "ContainerPreferredAllocationResponse": {"deviceIDs": (1, "*string")},
    "AllocateRequest": {"container_requests": (1, "*ContainerAllocateRequest")},
    "ContainerAllocateRequest": {"devices_ids": (1, "*string")},
    "AllocateResponse": {"container_responses": (1, "*ContainerAllocateResponse")},
    "ContainerAllocateResponse": {
        "envs": (1, "map"),
        "mounts": (2, "*Mount"),
        "devices": (3, "*DeviceSpec"),
        "annotations": (4, "map"),
        "cdi_devices": (5, "*CDIDevice"),
    },
    "Mount": {
        "container_path": (1, "string"),
        "host_path": (2, "string"),
        "read_only": (3, "bool"),
    },
    "DeviceSpec": {
        "container_path": (1, "string"),
        "host_path": (2, "string"),
        "permissions": (3, "string"),
    },
    "CDIDevice": {"name": (1, "string")},
}

_POD_RESOURCES: Table = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": (1, "*PodResources")},
    "PodResources": {
        "name": (1, "string"),
        "namespace": (2, "string"),
        "containers": (3, "*ContainerResources"),
    },
    "ContainerResources": {
        "name": (1, "string"),
        "devices": (2, "*ContainerDevices"),
        "cpu_ids": (3, "*int64"),
        "memory": (4, "*ContainerMemory"),
        "dynamic_resources": (5, "*DynamicResource"),
    },
    "ContainerDevices": {
        "resource_name": (1, "string"),
        "device_ids": (2, "*string"),
        "topology": (3, "TopologyInfo"),
    },
    "ContainerMemory": {
        "memory_type": (1, "string"),
        "size": (2, "uint64"),
        "topology": (3, "TopologyInfo"),
    },
    "TopologyInfo": {"nodes": (1, "*NUMANode")},
    "NUMANode": {"ID": (1, "int64")},
    "DynamicResource": {
        "claim_name": (2, "string"),
        "claim_namespace": (3, "string"),
        "claim_resources": (4, "*ClaimResource"),
    },
    "ClaimResource": {
        "cdi_devices": (1, "*CDIDevice"),
        "driver_name": (2, "string"),
        "pool_name": (3, "string"),
        "device_name": (4, "string"),
        "share_id": (5, "string"),
    },
    "CDIDevice": {"name": (1, "string")},
}

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
}


def _add_map(
    message: descriptor_pb2.DescriptorProto, package: str, name: str, number: int, value: str
) -> None:
    """Add a map field; on the wire it is a list of messages {key, value}."""
    words = name.split("_")
    entry = "".join(word.capitalize() for word in words) + "Entry"
    pair = message.nested_type.add(name=entry)
    pair.options.map_entry = True
    for at, (each, what) in enumerate((("key", "string"), ("value", value)), start=1):
        _set_type(pair.field.add(name=each, number=at, label=_FIELD.LABEL_OPTIONAL), package, what)
    kind = f".{package}.{message.name}.{entry}"
    message.field.add(
        name=name,
        number=number,
        type=_FIELD.TYPE_MESSAGE,
        type_name=kind,
        label=_FIELD.LABEL_REPEATED,
    )


def _set_type(field: descriptor_pb2.FieldDescriptorProto, package: str, kind: str) -> None:
    scalar = _SCALARS.get(kind)
    field.type = _FIELD.TYPE_MESSAGE if scalar is None else scalar
    if scalar is None:
        field.type_name = f".{package}.{kind}"


def classes(package: str, table: Table) -> SimpleNamespace:
    """Return the classes of a table's messages, by name.

    They are in a separate descriptor pool, so that another library may define the same package.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("map"):
                _add_map(message, package, field, number, kind.partition(":")[2] or "string")
                continue
            label = _FIELD.LABEL_REPEATED if kind.startswith("*") else _FIELD.LABEL_OPTIONAL
            new = message.field.add(name=field, number=number, label=label)
            _set_type(new, package, kind.lstrip("*?"))
            if kind.startswith("?"):
                new.proto3_optional = True
                new.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    made: dict[str, Any] = {}
    # As protoc's generated code does: older versions of message_factory have other functions.
    builder.BuildTopDescriptorsAndMessages(pool.FindFileByName(file.name), __name__, made)
    return SimpleNamespace(**{name: made[name] for name in table})


plugin = classes(VERSION, _DEVICE_PLUGIN)
pod_resources = classes("v1", _POD_RESOURCES)
