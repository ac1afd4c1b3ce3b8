"""AMD GPUs and partitions for a cluster."""

from gpuhook.cluster.vendors.cluster import Cluster


class AmdCluster(Cluster):
    """GPUs and partitions, each one of a resource."""

    nothing = "none"  # AMD's own runtime would read "void" as the name of a GPU


CLUSTER = AmdCluster
