"""How the hosts of a run agree on who takes part: store.py (memory), membership.py (rules), attempt.py (torchrun)."""
