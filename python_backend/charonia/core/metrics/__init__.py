"""What is counted, and the table that names it."""
