"""What the doctor looks at of NVIDIA's driver."""
