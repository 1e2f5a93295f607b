# Everything on a fresh machine: `make demo` trains, `make test` tests. Both set up first.
PYTHON ?= python3
SCHEDULE ?= dualpipev
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test soak lint style setup clean bench paper docs

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

demo: $(READY)
	$(BIN)/piper show examples/train_experts.py --schedule $(SCHEDULE)
	$(BIN)/piper run examples/train_experts.py -n 4 --schedule $(SCHEDULE)

lint: style
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check src tests examples bench
	$(BIN)/ruff format --check src tests examples bench

# Three groups at once, with one cache of captured regions, which is empty at first.
# Tests with several processes, and with a browser, mostly wait. The other two groups and the type
# checker run at a lower priority, so that they do not delay the first, and print their output at the
# end.
# `CI` is set everywhere, since torch and hypothesis look at it: what passes here passes there.
# Bytecode is written, whatever the environment says: many processes import the same files.
BESIDE = nice -n 10 $(BIN)
ALONE = $(BESIDE)/pytest -m 'not processes and not soak'
SECOND = $(addprefix tests/, job cli)
WORKERS = $(shell grep -lrE --include='test_*.py' 'run_on|processes' tests)

test: export PYTHONDONTWRITEBYTECODE =
test: export CI = true
test: style
	@export PIPER_CACHE=$$(mktemp -d); $(BESIDE)/mypy > .types.log 2>&1 & types=$$!; \
	$(ALONE) $(SECOND) > .row2.log 2>&1 & two=$$!; \
	$(ALONE) $(SECOND:%=--ignore=%) > .row3.log 2>&1 & three=$$!; \
	trap "kill $$types $$two $$three" INT TERM; \
	$(BIN)/pytest -m 'processes and not soak' $(WORKERS); status=$$?; \
	for row in $$types $$two $$three; do wait $$row || status=1; done; \
	cat .types.log .row2.log .row3.log; rm -rf "$$PIPER_CACHE"; exit $$status

soak: $(READY)
	PIPER_SOAK=1 $(BIN)/pytest -m 'soak or drawn'

bench: $(READY)
	$(BIN)/python bench/all.py

# The paper's evaluation: all pieces, or `make paper PIECE=zero`. Writes docs/paper.md.
paper: $(READY)
	$(BIN)/python bench/paper.py $(PIECE)

# The site, in .site/index.html. It needs mkdocs-material: pip install -e ".[docs]"
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV)
