"""Rejected messages: dead letters, and how broken ones are counted without a second reading."""
