"""Random cells over all axes, against an oracle that shares no code with threed (`oracle.py`)."""
