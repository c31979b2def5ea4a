"""The `charonia` command: one module for each of its verbs, and `make interface`."""
