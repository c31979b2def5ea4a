"""Keeps a server alive: who looks at it, who judges what they see, and who repairs."""
