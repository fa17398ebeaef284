"""Commands other than `train`: what each does after the command line has been parsed."""
