"""The Delta ledger: a copy of the engine's ledger, and the listeners that keep it complete."""
