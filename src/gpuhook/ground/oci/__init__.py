"""config.json, the state, and the command lines of low-level runtimes."""
