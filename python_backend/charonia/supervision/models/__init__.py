"""Supervision from inside the models' processes: of the engine, the server and other schedulers."""
