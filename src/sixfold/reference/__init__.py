"""The reference: a frozen model that computes log-probs of samples, for KL or distillation.

None of its parameters is ever in an optimizer.
"""
