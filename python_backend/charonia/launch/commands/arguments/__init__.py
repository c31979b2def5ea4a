"""The command line's grammar, grouped by subject."""
