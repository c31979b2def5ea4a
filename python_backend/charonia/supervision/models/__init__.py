"""Supervision from inside the models' processes: of the engine and the server."""
