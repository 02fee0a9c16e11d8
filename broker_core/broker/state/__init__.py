"""What all parts of the state are made of: records, blocks, changes, numbers, and undo."""
