"""The only folder that uses private or version-dependent names of Lightning, each with its reason.

``tests/test_lightning_internals.py`` fails when Lightning removes such a name.
"""
