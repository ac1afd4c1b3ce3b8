"""AWS Neuron: as resources of a cluster."""
