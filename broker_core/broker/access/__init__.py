"""Users, their permissions, and what a caller may do."""
