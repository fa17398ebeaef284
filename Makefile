# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test lint bench differential clean help

help:
	@echo "make demo    teach a small model to add, on this machine, in under five minutes"
	@echo "make test    ruff, mypy and every test"
	@echo "make differential   the maths against verl, TRL and OpenRLHF (installs them into .venv-peers)"
	@echo "make bench   one GRPO step beside TRL (installs TRL into .venv-trl; about half an hour)"
	@echo "make clean   remove the virtual environments"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,gym,tensorboard]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/sixfold train demo --overwrite

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks recipes docs
	$(BIN)/ruff format --check src tests benchmarks recipes docs
	$(BIN)/mypy

test: lint
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python benchmarks/grpo_step.py

PEERS := .venv-peers
$(PEERS)/installed: tests/differential/requirements.txt tests/differential/requirements-no-deps.txt constraints.txt
	sh tests/differential/make_env.sh $(PYTHON) $(PEERS)
	@touch $@

differential: $(PEERS)/installed
	PEERS_REQUIRED=1 OMP_WAIT_POLICY=PASSIVE $(PEERS)/bin/python -m pytest tests/differential

clean:
	rm -rf $(VENV) .venv-trl $(PEERS)
