"""The page: what an operator sees in a browser. It shows what the API answers, and asks it for changes."""
