"""The critic of actor-critic algorithms: how much reward is still to come from here? A value model, and how it learns beside the policy."""
