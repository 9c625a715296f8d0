"""Linear attention is gradient descent: figure 4."""
