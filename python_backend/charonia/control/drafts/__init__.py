"""Tokens that are guessed from text, and how many of them a step verifies."""
