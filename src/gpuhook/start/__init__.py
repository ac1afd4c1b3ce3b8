"""All that makes a start cheap, and nothing else."""
