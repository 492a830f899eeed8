"""Families of models: a family is a list of layers, a configuration and named sizes."""
