# `make site` shows the site, `make quick` checks the code within a minute, and `make test`
# checks everything.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: site build quick test types strict clean

site: $(INSTALLED)
	$(BIN)/mkdocs serve --livereload

build: $(INSTALLED)
	$(BIN)/mkdocs build --strict

quick: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not slow"

# The strict build comes before the tests, which look at the site that it leaves.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs=2 types strict
	HEADNOTES_SITE=site $(BIN)/pytest -n 2

types: $(INSTALLED)
	$(BIN)/mypy

strict: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv .cache site

# The versions are pinned in constraints.txt. What pip would compile one by one is compiled
# on all cores. The font list of matplotlib is built here, once, so that no lesson has to
# wait for it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"Headnotes needs Python 3.11 or newer, this is {sys.version.split()[0]}; \
	  name another with: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs,test]'
	-$(BIN)/python -m compileall -qq -j 0 .venv/lib
	$(BIN)/python -c 'import matplotlib.font_manager'
	touch $@
