"""What an operator does with a broker as a whole: its status, a backup, its definitions."""
