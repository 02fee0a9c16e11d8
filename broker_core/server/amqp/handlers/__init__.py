"""Handlers of AMQP commands, and the two that come with the server."""
