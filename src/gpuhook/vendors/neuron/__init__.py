"""AWS Neuron by the contract: Inferentia and Trainium."""
