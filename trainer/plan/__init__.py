"""What a run will need: `trainer plan` tells it beforehand, and a run holds it against what is free (room.py)."""
