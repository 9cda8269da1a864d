"""Real systemd hosts on this machine, in a network namespace of their own: `make lab`, `python3 -m lab`."""
