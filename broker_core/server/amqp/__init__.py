"""The AMQP door."""
