"""The domain: exchanges, queues, channels, transactions, claims and the ledger. No I/O, no clock, no
frames.
"""
