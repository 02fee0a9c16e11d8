"""Micro-batches over the queues of the embedded broker: branches, owners, the decision as one change."""
