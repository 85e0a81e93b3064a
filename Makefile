# Every target sets up what it needs by itself, in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Newer NVRx wheels want a newer glibc than many machines have. Their Python files run anywhere.
NVRX_LATEST := 0.7.0
LATEST := .nvrx-latest
REWRITTEN := tests/__pycache__/.rewritten
NEMO_RUN := .nemo-run
# The ends of what pyproject.toml claims, each in an environment of its own. torch takes 6 GB in each, unless pip is given
# a place with CPU builds (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
VERSIONS := .versions
OLDEST_PYTHON := $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) python3.10)
NEWEST_PYTHON := $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python) python3.13)
OLDEST := torch==2.8.0 lightning==2.6.0 lightning-utilities==0.10.0 torchmetrics==1.0.0 numpy==1.26.4 psutil==6.0.0 \
	xxhash==3.4.1 nvidia-resiliency-ext==0.4.1
NEWEST := torch==2.15.0 lightning==2.6.6
TEST_WITH := pytest>=8 pytest-timeout>=2.3 pytest-xdist>=3.5 jsonargparse[signatures]>=4.39 tensorboard>=2.16 torchdata>=0.11
CORE_TESTS := lightning_internals contract preemption auto_resume logs outputs local_checkpoint launch nan_guard
# What only an old version has shown: SWALR of torch 2.8 keeps a function in its state.
AND_TESTS := tests/test_exact_resume.py::test_ranks_with_callbacks_that_change_what_is_trained

# One thread for each process: the ranks share the cores, and results do not depend on how many there are.
export OMP_NUM_THREADS := 1
# Torch's, about a package that NVRx needs: it would come before anything else.
export PYTHONWARNINGS := ignore:The pynvml package is deprecated:FutureWarning
# Tests start hundreds of Python processes: compiled files are kept, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-kills test-mutations test-slurm test-nvrx-latest test-nemo-run test-versions check bench pictures docs clean

help: ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 25

demo: $(READY) ## Watch a training survive ten faults (4 to 5 minutes)
	@$(BIN)/python examples/demo.py

# More processes than cores wait for one another, and some tests have limits that such a crowd can break. What failed
# is therefore run again, alone: what fails then too has failed. What does not is a test to be mended, and is named.
define run-tests
$(BIN)/python -m pytest -n $(2) --dist worksteal -rf -m '$(1)' || { \
	[ $$? = 1 ] && echo "Some tests failed beside others. Once more, alone:" && \
	$(BIN)/python -m pytest -m '$(1)' -v -x -rA --show-capture=no --last-failed --last-failed-no-failures none; \
}
endef

test: $(REWRITTEN) .venv/.as-on-gpu ## Run the fast tests: everything that can fail differently, once (5 minutes on 2 cores)
	@$(call run-tests,not slow and not campaign and not slurm,4)

test-all: $(REWRITTEN) .venv/.as-on-gpu ## Run all tests but the campaigns and those on a real Slurm (50 minutes on 2 cores)
	@$(call run-tests,not campaign and not slurm,6)

test-kills: $(READY) ## The long tests: kills at random instants, every signal, every hang, every drill
	@$(BIN)/python -m pytest -m campaign --timeout=1800

test-mutations: $(READY) ## Take each guard away, one at a time, and see a test fail each time (about half an hour)
	@$(BIN)/python -m tests.mutations

test-gpu: $(READY) ## Check on this machine's NVIDIA GPUs what only they can show (less than 40 minutes)
	@$(BIN)/python -m tests.gpu

test-slurm: $(READY) ## Run whole chains of jobs on a real Slurm that it starts here (root; about 7 minutes)
	@$(BIN)/python -m pytest -m 'slurm and not campaign' -rs

test-nvrx-latest: $(LATEST)/.ready ## Run the tests that depend on NVRx with its newest version (about 3 minutes)
	@$(LATEST)/bin/python -c 'from lightning_resilience._nvrx import installed_version as v; print("NVRx", *v()); assert v() == tuple(map(int, "$(NVRX_LATEST)".split(".")))'
	@$(LATEST)/bin/python -m pytest -m 'nvrx and not campaign'

test-nemo-run: $(NEMO_RUN)/.ready ## Run the tests of the plugins for NeMo-Run, on a real Slurm too (root; about 12 minutes)
	@$(NEMO_RUN)/bin/python -m pytest -m 'not campaign' tests/test_nemo_run.py

test-versions: $(VERSIONS)/oldest/.ready $(VERSIONS)/newest/.ready ## Run the core tests with the oldest and the newest Python, torch and Lightning
	@for set in oldest newest; do \
		bin=$(VERSIONS)/$$set/bin; \
		$$bin/python -c 'import sys, lightning, torch; from lightning_resilience._nvrx import installed_version as v; print("Python", sys.version.split()[0], "torch", torch.__version__, "Lightning", lightning.__version__, "NVRx", *v() or ["none"])' || exit 1; \
		PATH=$(CURDIR)/$$bin:$$PATH $$bin/python -m pytest -n 3 --dist worksteal -m 'not campaign and not slurm' -k 'not GPU' -rfs $(CORE_TESTS:%=tests/test_%.py) $(AND_TESTS) || exit 1; \
	done

check: $(READY) ## Check style and types, the number of lines, and that all guards have their tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -m '' tests/test_line_budget.py tests/test_mutations.py

bench: $(READY) ## Measure what a healthy training step pays
	@$(BIN)/python benchmarks/overhead.py

pictures: $(READY) runs/demo/run/outcome.json ## Draw the pictures of README and docs: from a recording, the demo's run and the tables (8 minutes)
	@$(BIN)/python docs/pictures

runs/demo/run/outcome.json: | $(READY)
	@$(BIN)/python examples/demo.py

docs: .venv/.docs-ready ## Build the documentation in docs/_build (broken links and names are errors)
	@PYTHONWARNINGS=ignore::FutureWarning $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --builder html docs docs/_build
	@echo "Open docs/_build/index.html"

clean: ## Remove the environment, caches and everything the demo has written
	rm -rf .venv $(LATEST) $(NEMO_RUN) $(VERSIONS) .mypy_cache .pytest_cache .ruff_cache runs build dist docs/_build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv (the first time this can take a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

# The simulated accelerator of the tests.
.venv/.as-on-gpu: $(READY) $(wildcard tests/as_on_gpu/*.cpp)
	@echo "Building the simulated accelerator of the tests (a minute or two) ..."
	@$(BIN)/python -c 'from tests import as_on_gpu; as_on_gpu.missing() or as_on_gpu.build()'
	@touch $@

.venv/.docs-ready: $(READY)
	@$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	@touch $@

# An environment in front of .venv, so that whatever a test starts finds the newer version.
$(LATEST)/.ready: $(READY) Makefile
	@echo "Setting up $(LATEST) with NVRx $(NVRX_LATEST) ..."
	@rm -rf $(LATEST) && $(BIN)/python -m venv --without-pip $(LATEST)
	@set -e; \
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	base=$$($(BIN)/python -c "$$packages"); latest=$$($(LATEST)/bin/python -c "$$packages"); \
	install="$(BIN)/pip install -qq --disable-pip-version-check --only-binary=:all: --target $$latest"; \
	$$install --no-deps --platform manylinux_2_39_x86_64 --python-version 3.12 nvidia-resiliency-ext==$(NVRX_LATEST); \
	$$install grpcio protobuf httpx; \
	echo "import site; site.addsitedir('$$base')" > $$latest/base.pth
	@touch $@

# The same with NeMo-Run, which brings half a gigabyte of packages that nothing else here needs.
$(NEMO_RUN)/.ready: $(READY) Makefile
	@echo "Setting up $(NEMO_RUN) ..."
	@rm -rf $(NEMO_RUN) && $(BIN)/python -m venv --without-pip $(NEMO_RUN)
	@set -e; \
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	base=$$($(BIN)/python -c "$$packages"); own=$$($(NEMO_RUN)/bin/python -c "$$packages"); \
	$(BIN)/pip install -qq --disable-pip-version-check --target $$own nemo-run==0.11.1 leptonai==0.27.3; \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	@touch $@

# What pytest makes of the tests' asserts is kept, but the workers would each make all of it at the same time.
$(REWRITTEN): | $(READY)
	@echo "Preparing the tests (half a minute, once) ..."
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null && touch $@

$(VERSIONS)/oldest/.ready: PYTHON := $(OLDEST_PYTHON)
$(VERSIONS)/oldest/.ready: WITH := $(OLDEST)
$(VERSIONS)/newest/.ready: PYTHON := $(NEWEST_PYTHON)
$(VERSIONS)/newest/.ready: WITH := $(NEWEST)
$(VERSIONS)/%/.ready: pyproject.toml Makefile
	@echo "Setting up $(@D): $(WITH) (this takes a while) ..."
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -qq --disable-pip-version-check $(foreach each,$(WITH) $(TEST_WITH),'$(each)') --editable .
	@touch $@
