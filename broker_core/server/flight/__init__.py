"""The Flight door."""
