"""Measurements: the trainer beside its peers, and its strategies beside each other. `python -m bench`, `make bench`."""
