"""Which queues a message goes to: exchanges, bindings and their indexes."""
