"""User layers: torch modules as the units of a plan."""
