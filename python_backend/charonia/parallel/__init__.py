"""Ranks: the processes of one engine that have parts of its models.

Owns starting and losing them, who says what to whom, and the collective operations between them.
Must not know requests, text or Triton.
"""
