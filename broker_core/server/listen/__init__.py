"""Listening sockets, and connections that are not open yet."""
