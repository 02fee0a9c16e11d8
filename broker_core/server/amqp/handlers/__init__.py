"""Handlers of AMQP commands."""
