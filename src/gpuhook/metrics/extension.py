"""The commands for metrics, and the names of pods for gpuhook list (``tools.extensions``)."""

COMMANDS = {
    "metrics": (
        "gpuhook.metrics.commands.metrics",
        "Export GPU usage per container to Prometheus.",
        "Services",
    ),
    "ps": ("gpuhook.metrics.commands.stats", "Show GPU usage per container once.", ""),
    "stats": ("gpuhook.metrics.commands.stats", "Show live GPU usage per container.", "Look"),
    "top": ("gpuhook.metrics.commands.stats", "Show live GPU usage per container.", ""),
}
MODULES = {"pod-names": "gpuhook.metrics.named"}
