"""``gpuhook dra``: devices for claims, via Kubernetes' Dynamic Resource Allocation (DRA)."""
