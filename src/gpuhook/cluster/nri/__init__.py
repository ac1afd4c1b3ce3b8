"""A plugin for the engine's NRI (Node Resource Interface): pods' devices without a runtime."""
