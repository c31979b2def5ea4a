"""From requests to steps: which requests have a row, what each row computes, and the results."""
