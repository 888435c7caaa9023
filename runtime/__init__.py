"""What keeps a run alive: checkpoints, locks, signals, devices, flags, what is printed."""
