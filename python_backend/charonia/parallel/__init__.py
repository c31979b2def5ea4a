"""Ranks: the processes of one engine, each with a part of its models.

Owns their start and their loss, the messages between them, and their collective operations. Must
not know requests, text or Triton.
"""
