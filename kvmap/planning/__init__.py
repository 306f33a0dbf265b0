"""What a run will hold and cost, from two configs and some settings: no weights are read, nothing is run.

`models.py` (a model's parameters and products), `devices.py` (what a device can do), `work.py` (FLOPs and
seconds of stages), `memory.py` (bytes, by stage and place), `remedies.py` (settings that make a run fit).
"""
