# Everything on a fresh machine: `make demo` trains, `make test` tests. Both set up first.
PYTHON ?= python3
SCHEDULE ?= dualpipev
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint setup clean bench

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

demo: $(READY)
	$(BIN)/piper show examples/train_experts.py --schedule $(SCHEDULE)
	$(BIN)/piper run examples/train_experts.py -n 4 --schedule $(SCHEDULE)

lint: $(READY)
	$(BIN)/ruff check src tests examples bench
	$(BIN)/ruff format --check src tests examples bench
	$(BIN)/mypy

# Two rows at once. Tests of several processes mostly wait for each other; the rest gets what time
# they leave, at a lower priority, so that none of them is late. It is told when all are done.
test: $(READY) lint
	@nice -n 10 $(BIN)/pytest -m 'not processes and not soak' > .alone.log 2>&1 & alone=$$!; \
	trap "kill $$alone" INT TERM; \
	$(BIN)/pytest -m 'processes and not soak'; status=$$?; \
	wait $$alone || status=$$?; cat .alone.log; exit $$status

bench: $(READY)
	$(BIN)/python bench/all.py

clean:
	rm -rf $(VENV)
