# `make train` and `make test` work on a fresh machine: Python >= 3.11 with venv, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# of pytest: one more than cores, as many tests wait for others now and then
# what the tests of a file share is made once, by one worker
WORKERS = --dist loadfile --numprocesses $(shell $(PYTHON) -c "import os; print(min(4, 1 + os.cpu_count()))")

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# Neither uv nor pip compiles the packages' files; Python compiles those that are imported, and keeps that
unexport PYTHONDONTWRITEBYTECODE

$(VENV)/.installed: requirements.txt pyproject.toml
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing requirements.txt into $(VENV): seconds by uv, one to three minutes by pip, once"
	@$(BIN)/python install.py requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	@echo "installing requirements-dev.txt into $(VENV)"
	@$(BIN)/python install.py requirements-dev.txt
	@touch $@

setup: $(VENV)/.installed  ## create .venv with the pinned packages: by uv, or by pip (INSTALLER=pip)

train: $(VENV)/.installed  ## train configs/gpt2_stdlib.yaml, the default, on the built-in corpus; ARGS="--train.steps 500" adds flags
	@$(BIN)/python scripts/train_gpt2.py $(ARGS)

speedrun: $(VENV)/.installed  ## train the speedrun's model (280 s on two cores), score and verify it; docs/speedrun.md has the rules
	TORCHINDUCTOR_CACHE_DIR=$$(mktemp -d) $(BIN)/python scripts/train_gpt2.py --config configs/speedrun.yaml $(ARGS)
	$(BIN)/python scripts/evaluate.py runs/speedrun
	$(BIN)/python scripts/verify_run.py runs/speedrun

test: $(VENV)/.installed-dev  ## run the fast tests (about three minutes on 2 cores)
	$(BIN)/pytest $(WORKERS) $(ARGS)

test-slow: $(VENV)/.installed-dev  ## run the tests with real launches (about ten minutes more)
	$(BIN)/pytest $(WORKERS) -m 'slow and not soak and not cluster' $(ARGS)

# pytest and the references of tests are newer; torch is the pinned one, which a machine has already
test-lowest:  ## run the fast tests with the oldest packages that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet uv
	cat requirements*.txt | grep -E '^(torch|pytest|lm_eval|kubeflow)' | .venv-lowest/bin/uv pip install --quiet \
	    --python .venv-lowest --resolution lowest-direct -r - -e '.[export,trackers,gguf]'
	.venv-lowest/bin/pytest $(WORKERS) $(ARGS)

test-kinds: $(VENV)/.installed-dev  ## run the tests that compare numbers on eight kinds of processors (some ten minutes)
	$(BIN)/python tests/kinds.py $(ARGS)

test-cluster: $(VENV)/.installed-dev  ## run the tests on a real Slurm and on network namespaces (some minutes; needs root)
	$(BIN)/pytest -m cluster $(ARGS)

faults: $(VENV)/.installed-dev  ## run every fault of docs/reliability.md at every place, with real processes (an hour or more)
	$(BIN)/pytest -m soak $(ARGS)

mutants: $(VENV)/.installed-dev  ## change the core in 280 places and list the changes that no test detects (half an hour or more)
	$(BIN)/python tests/mutants.py $(ARGS)

bench: $(VENV)/.installed-dev  ## measure a step and a checkpoint next to baselines, or one of them: ARGS=step; docs/benchmarks.md
	$(BIN)/python -m benchmarks $(ARGS)

DEVICE ?= cuda
TIERS ?= smoke speed
gpu: $(VENV)/.installed-dev  ## run the GPU checks of TIERS="smoke speed saves sizes real" that this commit has not passed. DEVICE=cpu: tiny
	GPU_DEVICE=$(DEVICE) GPU_TIERS="$(TIERS)" $(BIN)/pytest -vv -m gpu -rN --tb=no \
	    -p no:cacheprovider -o faulthandler_timeout=0 tests/test_gpu.py $(ARGS)

image:  ## build the container image with docker or buildah; docs/cloud.md
	docker/build.sh $(ARGS)

test-image: $(VENV)/.installed-dev  ## test the built image; RUN="podman --runtime runc run" selects another runtime
	$(BIN)/pytest -m image tests/launch/test_container.py $(ARGS)

lock: $(VENV)/.installed  ## pin the image's packages, for x86_64 and its Python; ARGS=--upgrade: newer releases
	$(BIN)/pip install --quiet uv
	{ grep -v '^-e' requirements.txt; echo s3fs; } | $(BIN)/uv pip compile - --quiet --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-annotate \
	    --custom-compile-command "make lock" --output-file docker/requirements.lock $(ARGS)

check: $(VENV)/.installed-dev  ## check formatting, lint, types and imports, all of them; edits nothing
	@failed=0; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/pyright || failed=1; \
	$(BIN)/lint-imports --no-cache || failed=1; \
	! grep -rnE --include=*.py '(all|is)close|approx\(|testing.assert_close|atol=' tests \
	    || { echo "tests compare numbers by tests/close.py"; failed=1; }; \
	exit $$failed

format: $(VENV)/.installed-dev  ## apply the formatter and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format --quiet .

# An environment of its own, without torch. mkdocs with --quiet would not count warnings.
docs: .venv-docs/.installed  ## write the reference pages and build the site into site/; warnings fail
	.venv-docs/bin/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	@echo "built: open site/index.html, or serve it: $(PYTHON) -m http.server -d site"

.venv-docs/.installed: requirements-docs.txt
	@$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet -r requirements-docs.txt
	@touch $@

clean:  ## remove the environments, the site and caches; data/ and runs/ stay
	rm -rf $(VENV) .venv-docs .venv-lowest site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup train speedrun test test-slow test-lowest test-kinds test-cluster faults mutants bench gpu image test-image lock check format docs clean
