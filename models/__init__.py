"""Models: families (lists of layers, and sizes by name), layers, and the model of a rank.

A layer's file has what planning must know of it and the computation. It knows `tensor` and below. Begin with
`layers/base`; `families` has gpt and llama; `own` is for models of torch modules of your own; `tiling` cuts
layers into tiles.
"""
