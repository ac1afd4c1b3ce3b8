"""OCI formats: config.json, the state, and command lines of low-level runtimes."""
