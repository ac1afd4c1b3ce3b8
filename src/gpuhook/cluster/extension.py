"""Commands and checks for clusters (``tools.extensions``)."""

COMMANDS = {
    "device-plugin": (
        "gpuhook.cluster.commands.device_plugin",
        "Run the Kubernetes device plugin.",
        "Kubernetes",
    ),
    "dra": ("gpuhook.cluster.commands.dra", "Run the Kubernetes DRA driver.", "Kubernetes"),
    "labels": (
        "gpuhook.cluster.commands.labels",
        "Print the node labels that the vendors' tools set.",
        "Kubernetes",
    ),
    "nri": ("gpuhook.cluster.commands.nri", "Add devices to pods as an NRI plugin.", "Kubernetes"),
}
CHECKS = "gpuhook.cluster.checks"
