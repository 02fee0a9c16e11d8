"""The contract of Arrow Flight between client and server."""
