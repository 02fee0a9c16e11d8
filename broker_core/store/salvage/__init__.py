"""What is intact in a damaged data directory: verified, and saved."""
