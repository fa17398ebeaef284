"""HTML pages from the jinja2 templates in `templates/`.

Every value is escaped, and characters that hide or reorder text are spelled out (`visible`). The
only exception is `Markup`, which only the drawing code in `svg.py` and the page of a lab
(`pages/page.py`: its script, and JSON with `<` escaped) make. A template that uses a value which
the caller did not pass raises an error.
"""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .numbers import number, percent
from .untrusted import visible


def render_page(template: str, package: str = "sixfold.report", **values: object) -> str:
    """The text of a template with `values` filled in.

    Args:
        package: package whose folder `templates` has it. It may extend those of `sixfold.report`.

    Raises:
        jinja2.UndefinedError: if the template uses a value that is not given.
    """
    return environment(package).get_template(template).render(**values)


@cache
def environment(package: str = "sixfold.report") -> Environment:
    folders = dict.fromkeys((package, "sixfold.report"))
    pages = Environment(
        loader=ChoiceLoader([PackageLoader(folder, "templates") for folder in folders]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_spelled_out,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"number": number, "percent": percent}
    return pages


def _spelled_out(value: object) -> str:
    return value if isinstance(value, Markup) else visible(str(value))
