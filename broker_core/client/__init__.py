"""The far end: a broker in another process."""
