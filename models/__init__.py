"""The models: `families` (lists of layers, and sizes by name), `layers`, `spec` (parameters and costs) and
`tiling` (layers cut into tiles)."""
