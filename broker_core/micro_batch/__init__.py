"""The rules of a micro-batch: claims, branches, the ledger."""
