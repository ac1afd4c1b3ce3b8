"""The commands for metrics, and the names of pods for gpuhook list (``tools.extensions``)."""

COMMANDS = {
    "metrics": (
        "gpuhook.metrics.commands.metrics",
        "Export GPU usage per container to Prometheus.",
        "Services",
    ),
    "stats": ("gpuhook.metrics.commands.stats", "Show live GPU usage per container.", "Look"),
}
MODULES = {"pod-names": "gpuhook.metrics.named"}
