"""Messages as Arrow: rows of a read, parts of a branch, and the files that hold them."""
