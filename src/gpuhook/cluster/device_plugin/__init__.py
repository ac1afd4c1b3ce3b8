"""The device plugin: offers this host's accelerators to a Kubernetes cluster."""
