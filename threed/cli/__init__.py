"""CLI: the verbs of `threed`, thin over `api`. Begin with `main`; `options` has each option once."""
