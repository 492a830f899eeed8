"""The version of threed, alone in a module, so that it can be read without importing anything."""

__version__ = "0.2.0.dev0"
