"""The broker: a domain without I/O, a durable store, and the servers on top of them."""

__version__ = "0.1.0"
