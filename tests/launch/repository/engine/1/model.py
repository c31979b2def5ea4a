"""Loads, and is never asked for anything."""


class TritonPythonModel:
    def execute(self, requests):
        raise NotImplementedError
