"""Durability: Arrow segments and one SQLite transaction for each group of commits."""
