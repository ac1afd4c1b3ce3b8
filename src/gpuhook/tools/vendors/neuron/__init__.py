"""AWS Neuron, for commands."""
