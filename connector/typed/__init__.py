"""Typed messages: bodies to columns and back."""
