"""From requests to steps: who has a row, what each row computes, and what became of it."""
