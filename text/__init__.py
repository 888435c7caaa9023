"""Where text comes from and how it becomes token ids: what `data.py` stands on."""
