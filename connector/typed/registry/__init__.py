"""A schema registry, and the bytes that name a schema in front of a body."""
