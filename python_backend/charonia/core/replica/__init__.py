"""One engine as the scheduler's process sees it: its steps, its life, and who comes after it."""
