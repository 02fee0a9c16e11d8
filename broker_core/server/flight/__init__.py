"""The Flight listener."""
