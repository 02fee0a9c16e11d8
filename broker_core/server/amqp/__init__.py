"""The AMQP listener."""
