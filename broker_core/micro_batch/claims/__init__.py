"""Which ranges an app reads: claims, starts, reads and releases."""
