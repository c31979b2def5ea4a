"""Speculative decoding: drafts made from text, and how many drafts a step verifies."""
