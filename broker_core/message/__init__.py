"""A message outside the broker: what is published and delivered, its properties and its headers."""
