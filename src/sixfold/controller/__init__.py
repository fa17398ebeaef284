"""The controller: calls the roles in order, owns the step count and the end of the run. The loop touches no parameter, logit or reward."""
