"""Messages to tokens, and tokens to text: all code that tokenizes prompts or decodes completions.

`renderer.py` has the class `Renderer`. The other modules are its parts.
"""
