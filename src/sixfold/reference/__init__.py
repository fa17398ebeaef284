"""The reference: a frozen model that says how likely the samples were before training. No parameter of it is ever in an optimizer."""
