# Two commands: `make site` shows the site, `make test` checks everything.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: site build test clean

site: $(INSTALLED)
	$(BIN)/mkdocs serve --livereload

build: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# The strict build comes before the tests, which find its lessons executed.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/pytest -n 2

clean:
	rm -rf .venv .cache site

# The versions are pinned in constraints.txt. The font list of matplotlib is built here,
# once, so that no lesson has to wait for it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"Headnotes needs Python 3.11 or newer, this is {sys.version.split()[0]}; \
	  name another with: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs,test]'
	$(BIN)/python -c 'import matplotlib.font_manager'
	touch $@
