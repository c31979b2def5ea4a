"""Watches processes and repairs them: beside the server, and in its models' processes."""
