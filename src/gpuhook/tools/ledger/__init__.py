"""The ledger of this node's devices: who has which, and which of their settings were changed."""
