"""Orders from a queue to a Delta table."""
