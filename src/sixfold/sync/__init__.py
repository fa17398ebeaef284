"""Weight sync: copy the trainer's weights to the sampler, with a version number and a check."""
