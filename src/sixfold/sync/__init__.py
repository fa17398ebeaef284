"""Weight sync: the trainer's weights reach the sampler, versioned and proven."""
