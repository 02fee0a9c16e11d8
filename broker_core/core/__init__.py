"""What both engines share: ids, records, changes and their undo, errors, checks, addresses."""
