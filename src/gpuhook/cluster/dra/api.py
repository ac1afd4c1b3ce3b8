"""Messages of the kubelet's interfaces for DRA: registration, claims (v1, v1beta1), health.

From k8s.io/kubelet: pkg/apis/pluginregistration/v1/api.proto, pkg/apis/dra/v1/api.proto,
pkg/apis/dra-health/v1/api.proto. A service has one name in a registration and another one on the
wire.
"""

from gpuhook.monitor.kubelet_api import DecodeError, Table, classes

__all__ = ["DecodeError", "claims", "health", "registration"]

REGISTRATION = "pluginregistration.Registration"
PLUGIN_TYPE = "DRAPlugin"

# Services by their names in a registration; a kubelet calls the first one that it knows.
PLUGINS = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
}
HEALTH = {
    "v1.DRAResourceHealth": "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth": "v1alpha1.DRAResourceHealth",
}
UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2
LONGEST_MESSAGE = 1024  # characters of the message about a device's health

_REGISTRATION: Table = {
    "InfoRequest": {},
    "PluginInfo": {
        "type": (1, "string"),
        "name": (2, "string"),
        "endpoint": (3, "string"),
        "supported_versions": (4, "*string"),
    },
    "RegistrationStatus": {"plugin_registered": (1, "bool"), "error": (2, "string")},
    "RegistrationStatusResponse": {},
}

_CLAIMS: Table = {
    "NodePrepareResourcesRequest": {"claims": (1, "*Claim")},
    "NodePrepareResourcesResponse": {"claims": (1, "map:NodePrepareResourceResponse")},
    "NodePrepareResourceResponse": {"devices": (1, "*Device"), "error": (2, "string")},
    "Device": {
        "request_names": (1, "*string"),
        "pool_name": (2, "string"),
        "device_name": (3, "string"),
        "cdi_device_ids": (4, "*string"),
        "share_id": (5, "?string"),  # not in v1beta1, whose readers ignore it
    },
    "NodeUnprepareResourcesRequest": {"claims": (1, "*Claim")},
    "NodeUnprepareResourcesResponse": {"claims": (1, "map:NodeUnprepareResourceResponse")},
    "NodeUnprepareResourceResponse": {"error": (1, "string")},
    "Claim": {"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
}

_HEALTH: Table = {
    "NodeWatchResourcesRequest": {},
    "NodeWatchResourcesResponse": {"devices": (1, "*DeviceHealth")},
    "DeviceHealth": {
        "device": (1, "DeviceIdentifier"),
        "health": (2, "int32"),  # an enum, which is the same on the wire
        "last_updated_time": (3, "int64"),
        "health_check_timeout_seconds": (4, "int64"),
        "message": (5, "string"),
    },
    "DeviceIdentifier": {"pool_name": (1, "string"), "device_name": (2, "string")},
}

registration = classes("pluginregistration", _REGISTRATION)
claims = classes("k8s.io.kubelet.pkg.apis.dra.v1", _CLAIMS)
health = classes("v1", _HEALTH)
