"""The device plugin: offers this host's accelerators to a Kubernetes cluster.

Its supervisor is ``service``, which sends the server a ``state.State``; ``server`` has an endpoint
for each resource, as described in ``gpuhook.cluster.kubelet_endpoint``.
"""
