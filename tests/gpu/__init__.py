"""Checks of what only a GPU can show, each with a verdict and its figures.

``python -m tests.gpu`` runs all of them, those of most value first; ``make test-gpu`` does it in ``.venv``. With
``--device fakegpu --quick`` whatever the simulated accelerator (``tests/as_on_gpu``) can run of them runs without one.
"""

import warnings

# Of torch, about a package that comes with NVRx.
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
