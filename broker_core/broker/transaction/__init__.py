"""What a transaction collects, its key and name, and how it ended."""
