"""The service for a node's kubelet, shared by the device plugin and DRA."""
