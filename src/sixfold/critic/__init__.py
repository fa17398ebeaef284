"""The critic of actor-critic algorithms: a value model that learns beside the policy.

It estimates the expected remaining reward at each token.
"""
