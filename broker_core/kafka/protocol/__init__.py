"""Kafka's requests as values and as bytes; error codes and SASL."""
