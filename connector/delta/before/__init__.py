"""Delta before the decision: what could fail is found, and files are written."""
