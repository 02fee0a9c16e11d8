"""The rules of a micro-batch that every engine shares: claims, the ledger, what is unapplied."""
