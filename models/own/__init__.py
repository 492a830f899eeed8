"""A model of user layers: torch modules of your own (`threed.Layers`), measured and cut into units."""
