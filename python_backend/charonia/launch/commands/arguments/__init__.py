"""The command line's grammar, by what commands are about."""
