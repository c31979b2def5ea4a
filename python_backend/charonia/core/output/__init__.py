"""Turns committed tokens into the output for clients: text, log-probabilities, the end."""
