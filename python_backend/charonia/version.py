"""This package's version, for those of its parts that must not import the whole."""

VERSION = "0.1.0"
