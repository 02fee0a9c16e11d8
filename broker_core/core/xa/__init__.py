"""What a manager of distributed transactions (XA) calls them, and finds again."""
