"""What keeps a run alive: checkpoints, locks, signals, devices, the command line, what is printed."""
