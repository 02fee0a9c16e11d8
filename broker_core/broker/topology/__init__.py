"""The names of a virtual host: queues, exchanges and bindings, and who owns a queue."""
