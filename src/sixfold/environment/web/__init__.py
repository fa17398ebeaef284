"""Environments in a browser: a shop, and sites of the user.

`tree.py` turns a page into the observation, `session.py` has the actions. `html_browser.py` and
`chromium.py` are the two browsers; both ask `site.py` for every page.
"""
