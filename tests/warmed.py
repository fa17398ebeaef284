"""What every run computes once in its process, computed in the server that tests fork from.

It is half of the time of a tiny run: the settings from the schema, the names of installed packages,
conversions of weights and the templates of reports. Nothing here starts a thread.
"""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from sixfold import plugins
from sixfold.recipe.knobs import knobs
from sixfold.report.page import environment

knobs()
plugins.names(plugins.VERBS)
get_checkpoint_conversion_mapping("qwen3")
for page in ("report.html", "staged.html"):
    environment().get_template(page)
