"""AWS Neuron behind the seam: Inferentia and Trainium."""
