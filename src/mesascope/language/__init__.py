"""Language models: the same blocks on numbers of a vocabulary, trained through the same runs."""
