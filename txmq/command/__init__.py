"""How a command is declared: its words, its parameters, and what their values are."""
