"""The scope: what a trained sequence model computes, read from its activations, gradients and weights.

`probes` asks what can be read linearly from activations (`targets` has what to look for), `binding` which tokens a
layer brings together, `scores` how well a model learns in context and whether its predictions are those of an
algorithm. These stream over sequences and take any function that returns named activations. `circuits` reads products
of named weights, `linearize` and `interventions` take a function that accepts `edit`, `few_shot` one from tokens to
predictions. All return frozen dataclasses of arrays with named axes, intervals over seeds and sequences, a verdict and
a `plot()`; `results` is what they share. At most one in a hundred models that lack what a verdict is about gets it.
"""
