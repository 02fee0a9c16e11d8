"""Operations on tables as values, their checks, and the port to a table format."""
