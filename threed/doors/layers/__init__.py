"""Layers of somebody's own: torch modules as the units of a plan."""
