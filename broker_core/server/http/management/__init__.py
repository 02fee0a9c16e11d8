"""RabbitMQ's management API: its paths, names and types, as version 3.10 has them."""
