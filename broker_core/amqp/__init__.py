"""AMQP on the wire, one package for each protocol version; here is nothing but the name.

Not here: sockets, clocks, threads, and what a method means to a broker. The versions below are pure: bytes
in, values out, and back.
"""
