# `make train` and `make test` work on a fresh machine: Python >= 3.11 with venv, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
WORKERS := --numprocesses auto --maxprocesses 4  # of pytest: one per core
# one more, as most of the slow tests wait for others now and then
MORE = --numprocesses $(shell $(PYTHON) -c "import os; print(min(4, 1 + os.cpu_count()))")

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
	@touch $@

train: $(VENV)/.installed  ## train the default model on the built-in corpus; ARGS="--train.steps 500" adds flags
	$(BIN)/accelerate launch -q --config_file configs/accelerate/one_process.yaml scripts/train_gpt2.py $(ARGS)

test: $(VENV)/.installed-dev  ## the tests that a newcomer runs (under 10 minutes on 2 cores)
	$(BIN)/pytest $(WORKERS) $(ARGS)

test-slow: $(VENV)/.installed-dev  ## launches of real processes and timings (under 20 minutes more)
	$(BIN)/pytest $(MORE) -m 'slow and not soak and not timed and not cluster' $(ARGS)
	$(BIN)/pytest -m timed --reruns 4 $(ARGS) || [ $$? -eq 5 ]  # 5: ARGS chose none of them

test-cluster: $(VENV)/.installed-dev  ## a real Slurm, and machines made of network namespaces; some minutes; as root
	$(BIN)/pytest -m cluster $(ARGS)

faults: $(VENV)/.installed-dev  ## every fault of docs/reliability.md at every place, with real processes (an hour or more)
	$(BIN)/pytest -m soak --deselect tests/faults/test_soak.py $(ARGS)

soak: $(VENV)/.installed-dev  ## half an hour of random faults on one run; SOAK_SECONDS=60 SOAK_SEED=1 make soak for less
	$(BIN)/pytest -s -m soak tests/faults/test_soak.py $(ARGS)

mutants: $(VENV)/.installed-dev  ## changes the core in 200 places, and reports what no test notices (half an hour or more)
	$(BIN)/python tests/mutants.py $(ARGS)

DEVICE ?= cuda
gpu: $(VENV)/.installed-dev  ## what to run first on a GPU; again, it goes on from there. DEVICE=cpu tries it, tiny
	$(BIN)/python scripts/benchmark.py gpu --device $(DEVICE) --output runs/gpu $(ARGS)

image:  ## build the container image, by docker or buildah; docs/container.md
	docker/build.sh $(ARGS)

test-image: $(VENV)/.installed-dev  ## what the built image does; RUN="podman --runtime runc run" runs it otherwise
	$(BIN)/pytest -m image tests/test_container.py $(ARGS)

lock: $(VENV)/.installed  ## pin what the image has, for x86_64 and its Python; ARGS=--upgrade takes newer releases
	$(BIN)/pip install --quiet uv
	grep -v '^-e' requirements.txt | $(BIN)/uv pip compile - --quiet --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-annotate \
	    --custom-compile-command "make lock" --output-file docker/requirements.lock $(ARGS)

check: $(VENV)/.installed-dev  ## formatting, lint and types; edits nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev  ## apply the formatter and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches; data/ and runs/ stay
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help train test test-slow test-cluster faults soak mutants gpu image test-image lock check format clean
