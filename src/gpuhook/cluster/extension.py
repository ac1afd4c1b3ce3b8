"""Commands and checks for clusters (``tools.extensions``)."""

COMMANDS = {
    "device-plugin": (
        "gpuhook.cluster.commands.device_plugin",
        "Run the Kubernetes device plugin.",
    ),
    "dra": ("gpuhook.cluster.commands.dra", "Run the Kubernetes DRA driver."),
    "labels": (
        "gpuhook.cluster.commands.labels",
        "Print the node labels that the vendors' tools set.",
    ),
    "nri": ("gpuhook.cluster.commands.nri", "Add devices to pods as an NRI plugin."),
}
CHECKS = "gpuhook.cluster.checks"
