"""The models: `registry` (sizes by name), `spec` (parameters, work and memory; no torch), `gpt` (the
layers)."""
