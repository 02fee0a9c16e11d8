"""The journal of an app: which changes were accepted, and what they add up to."""
