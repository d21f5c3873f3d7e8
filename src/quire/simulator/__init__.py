"""The capacity simulator: the engine's own scheduler on a virtual clock, with predicted times of steps."""
