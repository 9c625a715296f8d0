"""The scope: what a trained sequence model computes, read from its activations, gradients and weights.

`probes` asks what can be read linearly from activations (`targets` has what to look for), `binding` which tokens a
layer brings together, `scores` how well a model learns in context and whether its predictions are those of an
algorithm. All of them stream over sequences, take any function that returns named activations, and return frozen
dataclasses of arrays with intervals and a `plot()`.
"""
