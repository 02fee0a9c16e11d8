"""The running broker: one state over one store, with its lock, its clock and its upkeep."""
