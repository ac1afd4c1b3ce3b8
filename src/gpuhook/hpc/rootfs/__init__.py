"""Devices for a root folder without a container engine: the hook's plan, applied there."""
