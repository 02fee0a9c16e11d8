"""The domain: queues, channels, transactions, and micro-batches over them. No I/O, no clock, no frames."""
