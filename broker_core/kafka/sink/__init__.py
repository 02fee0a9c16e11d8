"""What an app writes: staged branches, the decision, and who may decide."""
