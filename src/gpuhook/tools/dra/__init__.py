"""Dynamic Resource Allocation: this node's devices in a cluster, and its claims."""
