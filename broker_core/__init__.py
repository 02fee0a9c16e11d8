"""The broker: a domain that knows no I/O, a durable store, and the servers on top of them."""
