"""The paper's theory: in-context algorithms, and the same algorithms written as attention weights.

`solvers` has the algorithms, from one gradient step to least squares, as functions of a sequence that predict at every
time step at once. `constructions` has them as ordinary Transformers whose weights are written by hand. `latent` has
what can be known of a partially observed system from its past observations, `encoders` regression on codes of them.
"""
