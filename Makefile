# Needs python3 (3.11 or later) with venv, and make. Everything else is installed into .venv here.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo test soak lint clean distclean

setup: $(INSTALLED)

# Only the dependencies: the folders of this checkout are run from here, never installed.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11 to 3.13 is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print("\n".join(p["dependencies"] + p["optional-dependencies"]["dev"]))' > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
	touch $@

# Trains a small model as a Ray job in a few minutes. KEEP=1 leaves the Ray head and its dashboard up.
demo: $(INSTALLED)
	$(BIN)/python -m tasks.demo $(if $(filter-out 0,$(KEEP)),--keep)

# Two at a time: most of the suite waits for processes to start. A file stays together, for what its tests share.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Kills every process of real runs at every operation of a step and file of a checkpoint, cuts their power, kills at
# random for ten minutes, and tries twenty times as many damaged inputs. About an hour and a quarter.
soak: $(INSTALLED)
	MEGATRAIN_SOAK=1 $(BIN)/python -m pytest tests/faults -s

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .numba_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
