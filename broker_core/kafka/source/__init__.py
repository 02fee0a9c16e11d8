"""What an app reads: partitions as logs, claims, and rows of ranges."""
