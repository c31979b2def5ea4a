"""Estimates learned from past steps and answers: times, lengths, and the memory that they take."""
