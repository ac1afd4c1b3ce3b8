"""The vendor AWS Neuron: Inferentia and Trainium."""
