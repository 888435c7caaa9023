"""For GPUs: fast forms of functions in model.py and gn.py, each tested against the plain one."""
