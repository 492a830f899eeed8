"""User layers: a model made of torch modules of your own (`threed.Layers`), measured and cut into units."""
