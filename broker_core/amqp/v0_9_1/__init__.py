"""AMQP 0-9-1 with RabbitMQ's extensions, as values and bytes: methods, decoder, encoder, state tables, the
connection, SASL responses.

Not here: a socket, a clock, a broker.
Invariant: every module is a function of what it is given.
"""
