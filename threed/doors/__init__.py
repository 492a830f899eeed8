"""Doors: what comes in from other frameworks, and goes out to them."""
