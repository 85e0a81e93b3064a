"""The only folder that touches private or version-dependent names of Lightning; each with its reason.

``tests/test_lightning_internals.py`` fails when a name goes away.
"""
