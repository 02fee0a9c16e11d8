"""Delta after the decision: each change is made once."""
