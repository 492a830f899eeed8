"""Config: read a config, fill in its defaults, and judge it.

Every key is told in `threed.schema`, with the values that it may have (`values` checks them). It knows
`models` and below; no torch. Begin with `load`. `validate` checks one config as a whole, `contract` says
which features work together, `keys` has other frameworks' keys.
"""
