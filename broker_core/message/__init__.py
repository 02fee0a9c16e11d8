"""A message outside the broker: what is published and delivered, its properties and headers; field tables,
and the arguments that AMQP declares in them.
"""
