"""The scope: what a trained sequence model computes, read from its activations, gradients and weights.

`probes` asks what can be read linearly from activations (`targets` has what to look for), `binding` which tokens a
layer brings together, `scores` how well a model learns in context and whether its predictions are those of an
algorithm. These stream over sequences and take any function that returns named activations. `circuits` reads products
of named weights, `linearize` and `interventions` take a function that accepts `edit`, `few_shot` one from tokens to
predictions. All return frozen dataclasses of arrays with named axes, intervals over seeds and sequences and a `plot()`,
and a verdict where there is something to decide; `results` is what they share. At most one in a hundred models that
lack what a verdict is about gets it. Arguments come in one order: models with a seed axis, what draws the sequences,
what is asked; then by name how a model is run (ours by default), and the key.
"""
