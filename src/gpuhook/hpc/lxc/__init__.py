"""Devices for LXC containers: lines for their configuration files, kept up to date."""
