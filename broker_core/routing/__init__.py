"""Routing, the same on every engine: what a message may contain, exchanges, bindings and their indexes. A
queue is what the engine has for one (:class:`broker_core.routing.exchange.RoutedQueue`).
"""
