"""Configuration of container engines to use gpu-py: a module per engine, and shared code."""
