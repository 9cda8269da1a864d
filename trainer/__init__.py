"""The trainer: `python -m trainer`. Start reading at loop.py; architecture in docs/architecture.md."""

__version__ = "0.1.0"
