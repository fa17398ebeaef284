"""The one model definition of trainer and engine: a Hugging Face causal LM.

It runs in two halves, body and head, with Sixfold's attention. Of Sixfold's packages, it imports
only leaves.
"""

from . import minigpt as minigpt  # transformers' Auto classes do not know it otherwise
