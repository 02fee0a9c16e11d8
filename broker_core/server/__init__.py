"""The only sockets of the broker."""
