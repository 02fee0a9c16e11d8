# make first   a first stream, in a minute: four messages, a Delta table, two queues
# make demo    real flights, exactly once, while drivers and the broker are killed
# make demo-kafka            the same on a Kafka cluster of three nodes, one of which is killed at a time
# make test    ruff, mypy --strict, import contracts, bandit, known vulnerabilities and all tests
#              PATHS="tests/broker tests/x.py": these tests alone, without the checks
# make quick   what a change needs, in a minute: ruff, mypy, import contracts and the quick tests
# make soak ROUNDS=200      loops of kills, as long as you like, and the matrix at the end; SEED=n repeats one
# make soak HOURS=8         everything at once for hours, with kills: nothing is lost, doubled or growing; goes on where it was cut
# make bench [ONLY=commit_1]     every figure beside its reference;  make bench-kafka: beside Spark's own Kafka source and sink
# make matrix  the same tests on every Spark, Delta, Python and JDK that go together; ARGS='--only 4.1.1 --write'.
#              The row of the pinned Spark and Delta is in `make test`
# make lint    the checks of `make test` without the tests
# make docs    the site of the pages, in site/: a dead link or a missing name fails
# make audit   known vulnerabilities of what is locked, for a release: fails also where they could not be asked
#
# Every target sets up what it needs in .venv first; it needs Python >= 3.10 and a JDK 17 or later.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv-demo/bin
ROUNDS ?= 100
HOURS ?=
WORKERS ?= 3
ONLY ?=
ARGS ?=
PATHS ?=
# Without what starts processes (Spark, Kafka, other clients, brokers, the command line) and the machines of model.
QUICK := $(foreach folder,cli crash interop model server spark,--ignore=tests/$(folder)) -m 'not spark and not crash and not slow and not soak'
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom)
SEED := $(strip $(SEED))

export PYSPARK_PYTHON := $(CURDIR)/.venv/bin/python
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/.venv/bin/python

.PHONY: first demo demo-kafka test quick quick-checks quick-tests soak matrix bench bench-kafka compiled lint docs audit lock

# In an environment of their own: 22 packages in place of the 178 of the tests. Python finds txmq in the checkout.
first demo: export PYSPARK_PYTHON := $(CURDIR)/$(DEMO)/python
first demo: export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(DEMO)/python
first demo: export PYTHONPATH := $(CURDIR)

# A JVM of seconds: no optimizing compiler, no collection each time that classes fill the metaspace. Loading the classes is
# half of its start: the first one writes an archive of them at its end, for which `cat` waits.
JVM := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m -Xlog:disable -Xlog:all=error:stderr
CLASSES := .venv-demo/spark-classes.jsa
first demo: export SPARK_SUBMIT_OPTS := $(JVM) -XX:SharedArchiveFile=$(CURDIR)/$(CLASSES)
# With Delta on the class path, the archive has its classes too, and Ivy is not asked at each start.
SUBMIT = submit="$$($(DEMO)/python -m bench.jars --submit)"; export PYSPARK_SUBMIT_ARGS="$$submit"
FIRST = $(SUBMIT); $(DEMO)/python examples/first_stream.py
ARCHIVED = export SPARK_SUBMIT_OPTS="$(JVM) -XX:ArchiveClassesAtExit=$(CURDIR)/$(CLASSES).new"; $(FIRST) $(1) | cat; \
	mv -f $(CLASSES).new $(CLASSES) || true

first: .venv-demo/ready
	@if test $(CLASSES) -nt .venv-demo/ready; then $(FIRST) $(ARGS); else $(call ARCHIVED,$(ARGS)); fi

demo: $(CLASSES)
	@$(SUBMIT); $(DEMO)/python examples/flights.py $(ARGS)

demo-kafka: .venv/ready
	$(BIN)/python examples/flights_kafka.py $(ARGS)

ifeq ($(strip $(PATHS)),)
test: .venv/ready
	@$(MAKE) --no-print-directory -j2 lint .venv/spark-classes.jsa compiled
	@echo "== pytest"
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 $(ARGS)
else
test: .venv/ready
	$(BIN)/python -m pytest -q $(PATHS) $(ARGS)
endif

quick: .venv/ready
	@$(MAKE) --no-print-directory -j2 quick-checks quick-tests

quick-checks:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary
	PYTHONPATH=. $(BIN)/lint-imports --no-logo > .venv/contracts.log || { cat .venv/contracts.log; exit 1; }

quick-tests:
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(QUICK) $(ARGS)

ifneq ($(strip $(HOURS)),)
soak: .venv/ready
	$(BIN)/python -m tests.endurance --hours $(HOURS) $(ARGS)
else
# A line for each test when it ends: a round takes an hour on two cores.
soak: .venv/ready .venv/spark-classes.jsa
	TXMQ_SOAK_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -v -n $(WORKERS) --dist loadgroup -m soak --soak-rounds=$(ROUNDS) --seed=$(SEED) $(ARGS)
	TXMQ_SOAK_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -v --hypothesis-seed=$(SEED) --seed=$(SEED) tests/model tests/kafka/journal/test_history.py tests/kafka/sink/test_sink_history.py $(ARGS)
	TXMQ_SESSION=connect $(BIN)/python -m pytest -v -n $(WORKERS) --dist loadfile tests/spark $(ARGS)
	$(BIN)/python -m tests.matrix
endif

# Environments of minutes and gigabytes, under .venv/matrix.
matrix: .venv/ready
	$(BIN)/python -m tests.matrix $(ARGS)

bench: .venv/ready
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench-kafka: .venv/ready
	$(BIN)/python -m bench.kafka $(ARGS)

# Once, for all workers: each compiles what it collects.
compiled: .venv/ready
	@$(BIN)/python -m pytest --quiet --collect-only > /dev/null || $(BIN)/python -m pytest --quiet --collect-only

lint: .venv/ready
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select RUF027 .  # an f-string without its f
	$(BIN)/ruff format --check .
	@echo "== mypy --strict"
	$(BIN)/mypy
	@echo "== import contracts"
	PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo
	@echo "== bandit"
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive txmq broker_core connector bench pyspark_txmq.py
	@echo "== known vulnerabilities"
	$(BIN)/python -m tests.advisories requirements.lock

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# For a release: as in lint, but a version that could not be asked about is a failure.
audit: .venv/ready
	$(BIN)/python -m tests.advisories --strict requirements.lock

# Pinned, with hashes, for every platform and Python; needs uv.
lock:
	uv pip compile --universal --python-version 3.10 --generate-hashes --all-extras --no-header --no-annotate -q pyproject.toml -o requirements.lock
	uv pip compile --universal --python-version 3.10 --generate-hashes --extra spark --extra demo --no-header --no-annotate -q -c requirements.lock pyproject.toml -o requirements-demo.lock

define NEEDED
command -v java > /dev/null || { echo "no java found: install a JDK 17 or later" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; say which with PYTHON=...")'
endef

# The environment, and the jars of Delta in the local Ivy cache: sessions that start side by side must not download them at once.
.venv/ready: requirements.lock pyproject.toml
	@echo "== setting up .venv"
	@$(NEEDED)
	@$(PYTHON) -m venv .venv
	@# A process compiles what it imports, which is little of all this.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m bench.jars > .venv/jars.log 2>&1 || { tail -n 40 .venv/jars.log >&2; exit 1; }
	@touch .venv/ready

.venv-demo/ready: requirements-demo.lock
	@echo "== setting up .venv-demo (once: pyspark is 450 MB)"
	@$(NEEDED)
	@$(PYTHON) -m venv .venv-demo
	@$(DEMO)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-demo.lock
	@$(DEMO)/python -m bench.jars > .venv-demo/jars.log 2>&1 || { tail -n 40 .venv-demo/jars.log >&2; exit 1; }
	@touch .venv-demo/ready

$(CLASSES): .venv-demo/ready
	@echo "== an archive of the classes of Spark (once)"
	@folder=$$(mktemp -d) && $(call ARCHIVED,$$folder) && rm -rf "$$folder"

# The classes that Spark and Kafka load, for the JVMs of the tests: they start in half the time. Tests run without them too.
.venv/spark-classes.jsa: .venv/ready tests/jvm.py
	@echo "== archives of the classes of Spark and Kafka, once"
	@$(BIN)/python -m tests.jvm > .venv/classes.log 2>&1 || tail -n 5 .venv/classes.log >&2
