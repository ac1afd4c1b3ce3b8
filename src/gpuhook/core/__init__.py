"""From a container's request to its allocated devices; vendors are known by contract only."""
