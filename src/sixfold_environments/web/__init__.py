"""Environments in a browser: a shop, and sites of the user.

`tree.py` renders a page as the observation. `session.py` implements the actions. `html_browser.py`
and `chromium.py` are the two browser backends. Both load every page through `site.py`.
"""
