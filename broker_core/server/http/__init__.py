"""The listener of HTTP: RabbitMQ's management API, the API of txmq, and metrics, on a thread of its own."""
