"""The package's version, in one place."""

RESULTS = 3
"""Raised when the same inputs come to give other results: stage files, training states and prepared clips of earlier
versions are then made again."""

__version__ = "0.1.0"
