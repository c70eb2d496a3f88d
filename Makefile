# `make site` shows the site, `make quick` checks the code without its slow tests, and
# `make test` checks everything.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
INSTALLED := .venv/.installed

export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Empty means unset: what is compiled is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: site free build quick test types code-tests site-tests transformers-4 clean

# Another program on the port is reported before anything is installed or built.
site: free $(INSTALLED)
	$(BIN)/mkdocs serve --livereload --dev-addr 127.0.0.1:$(PORT)

free:
	@$(PYTHON) -c 'import socket; \
	  s = socket.socket(); \
	  s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); \
	  s.bind(("127.0.0.1", int("$(PORT)")))' 2>/dev/null || \
	  { echo "Port $(PORT) is in use; choose another: make site PORT=8001" >&2; exit 1; }

build: $(INSTALLED)
	$(BIN)/mkdocs build --strict

quick: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not slow" --ignore=tests/site

# All that can run at the same time does; the build goes first, because the tests of the
# site wait for it. They look at the strict build, as it is published, with the addresses
# that they know.
test: export SITE_URL ?= http://headnotes.example/project/
test: export REPO_URL ?= https://github.com/someone/headnotes
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs types code-tests site-tests

types: $(INSTALLED)
	$(BIN)/mypy

code-tests: $(INSTALLED)
	nice $(BIN)/pytest -n 2 --ignore=tests/site

site-tests: build
	HEADNOTES_SITE=site $(BIN)/pytest -n 2 tests/site

# The pins are those of Transformers 5. Its last release of major version 4, and two
# packages that it needs in older releases, lie in a folder that Python looks into first.
transformers-4: $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .cache/transformers-4 \
	  'transformers==4.57.*' 'huggingface-hub<1' 'tokenizers<0.23'
	PYTHONPATH=.cache/transformers-4 $(BIN)/pytest tests/test_architectures.py \
	  tests/integrations src/headnotes/convert.py src/headnotes/integrations

clean:
	rm -rf .venv .cache site

# The versions are pinned in constraints.txt. A new pip finds them in half the time of the
# one that comes with Python. It compiles nothing: a quarter of the modules is ever
# imported, and Python keeps what it compiles then. What builds the two distributions is
# installed once, not in an environment for each. The font list of matplotlib is made
# here, once, so that no lesson has to wait for it.
$(INSTALLED): pyproject.toml src/sidenotes/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"Headnotes needs Python 3.11 or newer, this is {sys.version.split()[0]}; \
	  name another with: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip hatchling editables
	$(BIN)/pip install --no-compile --no-build-isolation --constraint constraints.txt \
	  --editable '.[docs,test]' --editable src/sidenotes
	@$(BIN)/python -c 'import matplotlib.font_manager'
	touch $@
