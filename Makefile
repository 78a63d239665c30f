# make demo           set up .venv, install, run the main job
# make test           set up .venv, install, lint, type-check, test
# make compose        every Function under every composition of transforms; `make test` takes some of each
# make tests FUSEGRAD_TESTS=all    every case of the long tables, of which `make test` takes a sample
# make seconds        what the slower tests of the sample take: tests/seconds.txt, by which `make test` leaves most of them out
# make bench          launches, bytes, registers, host time, first calls: what needs no GPU; writes build/bench, and the
#                     repository's results and docs/benchmarks.md with ARGS=--write-docs alone
# make pretended-gpu  every Function and kind of call on a pretended GPU: Triton's driver and launcher are real
# make gpu            on a machine with a GPU, first of all: right, fast, exported, in order of value, 20 minutes at a time
# make bench-gpu      times every case on a GPU, nine minutes at a time
# make threads        first calls, transforms and backwards in N=32 threads at once
# make processes      forks, spawned workers, data loaders, killed compilers, ends in the middle
# make environments   no compiler, no triton, odd folders and locales, -OO, notebooks, zipapps, ...
# make proofs         prove every access of every kernel that the tests know; ARGS=--json writes the numbers
# make counterexamples     z3 looks for sizes, programs and lanes that break what was proved; ARGS="--suite 4" takes fewer
# make cache-faults   N=10000 random mutations of a populated cache, each followed by a use
# make injection      each function of the package raises, one at a time, in calls of many kinds: eager answers
# make kills          N=100 processes killed during captures, compilations and writes, and started again
# make sharing        N=16 processes at once on one empty cache
# make job            N=8 processes of torchrun on one empty cache: how often is each kernel compiled?
# make soak           CALLS=1000000 calls over SHAPES=1000 shapes: memory, variants, threads, files; tensors of 100 MB
# make fuzz N=1000    random programs, compiled, against eager; SEED=0, JOBS=2, BACKEND="reference interpret:10"
# make mutants        one change of the generator or of a transform at a time, N=200: which do the tests notice?
# make dist           a wheel and a source distribution in dist/, the wheel tried in an environment of its own
# make newcomer       docs/tutorial.md on a fresh clone with a fresh environment: the seconds of each step
# make matrix         the tests with several pairs of torch and triton: PAIRS="2.11.0:3.6.0 newest"; ARGS="--pieces ir"
# make docs           the documentation as a site in build/site, which needs no network to be read
# make guards N=2000  random worlds: closures, globals, dtypes, layouts, torch's state; nothing stale is served
# make convergence    Hugging Face models over STEPS=200, swapped, beside themselves
# make numerics       write docs/numerics.md: the error of every operation beside eager's
# make conformance    write docs/conformance.md: torch's own Functions by eager, fusegrad and torch.compile
# make world          classes of published packages and their tests, beside eager; in pieces: it goes on where it stopped
# make fuzz-graphs N=200     random programs within the graphs of torch.compile and torch.export, against eager
# make fuzz-habits N=200    random Functions as people write them: registries, modules, generators, .data, print
# make fuzz-parts N=2000       random programs computed in parts, as ranks do with DTensors, against the whole
# make fuzz-streams N=200      random Functions whose scores need not be in memory, against eager
# make fuzz-configurations N=200    random programs under random settings: steps left out, backends, ..
#
#   PYTHON=python3.12         another interpreter (>= 3.11)
#   VENV=/path/to/venv        another environment, for example one that holds a CUDA build of torch already
#   CONSTRAINTS=              without the pins: keeps the torch that VENV has, if it is new enough
#   ARGS="--steps 20"         more arguments for the demo, or the benchmarks; make gpu ARGS="--minutes 9", ARGS=--report
#   TESTS=tests/ir            fewer tests

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
ARGS ?=
TESTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PINS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
STAMP := $(VENV)/.fusegrad-installed

.DEFAULT_GOAL := help
.PHONY: threads soak fuzz mutants numerics help install demo test lint types tests compose conformance guards bench bench-gpu docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(STAMP)

# torch first and alone, so that no other requirement chooses its version.
$(STAMP): pyproject.toml Makefile $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PINS) 'torch>=2.11'
	$(PIP) $(PINS) -e '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m fusegrad demo $(ARGS)

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .

# Type checkers do not see an editable install, hence a folder in which the root goes by its name.
types: $(STAMP)
	mkdir -p .typings
	test -e .typings/fusegrad || ln -s .. .typings/fusegrad
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/release/typed_functions.py

tests: $(STAMP)
	FUSEGRAD_TESTS=$(FUSEGRAD_TESTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --timeout=300 $(TESTS)

.PHONY: seconds
seconds: $(STAMP)
	FUSEGRAD_TESTS=seconds OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --timeout=300

compose: $(STAMP)
	FUSEGRAD_TESTS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --timeout=600 tests/compose

conformance: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/conformance/run.py

.PHONY: pretended-gpu
pretended-gpu: $(STAMP)
	FUSEGRAD_TESTS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout=900 tests/pretended_gpu tests/benchmarks/test_gpu_day_rehearsal.py

threads: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/threads.py --threads $(or $(N),32) $(ARGS)

.PHONY: processes environments
processes: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/processes.py $(ARGS)

environments: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/environments.py $(ARGS)

.PHONY: proofs
proofs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/proofs.py $(ARGS)

.PHONY: counterexamples
counterexamples: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/counterexamples.py $(ARGS)

# What is compared with eager is captured at once, however much was captured before.
conformance injection fuzz guards fuzz-graphs fuzz-habits fuzz-streams fuzz-configurations: export FUSEGRAD_DISABLE = patience

.PHONY: cache-faults kills sharing job injection
injection: $(STAMP)
	FUSEGRAD_STORE=0 OMP_NUM_THREADS=1 $(BIN)/python tests/trust/injection.py $(ARGS)

cache-faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/cache_faults.py --count $(or $(N),10000) $(ARGS)

kills: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/kills.py --count $(or $(N),100) $(ARGS)

sharing: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/sharing.py --processes $(or $(N),16) $(ARGS)

job: $(STAMP)
	$(BIN)/python tests/distributed/job.py --processes $(or $(N),8) $(ARGS)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/kept.py $(filter --json,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/soak.py --calls $(or $(CALLS),1000000) --shapes $(or $(SHAPES),1000) $(ARGS)

# In pieces: ARGS="--json benchmarks/results/trust/fuzz.json --resume".
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(or $(N),1000) --seed $(or $(SEED),0) --jobs $(JOBS) \
		--backend "$(or $(BACKEND),reference interpret:10)" $(ARGS)

# In pieces: ARGS="--json --resume --minutes 60".
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutant_runs.py -n $(or $(N),200) --seed $(or $(SEED),0) \
		--jobs $(JOBS) $(ARGS)

# What was captured in one world is never served, wrong, in another: random worlds, in one process and on disk.
guards: $(STAMP)
	OMP_NUM_THREADS=1 FUSEGRAD_STORE=0 $(BIN)/python tests/trust/pairs.py $(or $(N),2000) --seed $(or $(SEED),0) --json benchmarks/results/trust/guards.json
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/pairs.py $(or $(N),2000) --seed $(or $(SEED),0) --stored --json benchmarks/results/trust/guards.json

numerics: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/trust/numerics/measure.py $(ARGS)

# Pages and pictures are made by docs/site/make_site.py; a broken link fails.
docs: $(STAMP)
	$(PIP) $(PINS) -e '.[docs]'
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/make_site.py

# Beside the tests' requirements only what draws the picture.
bench: $(STAMP)
	$(PIP) $(PINS) -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m fusegrad.benchmarks $(ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python -m fusegrad.benchmarks.gpu $(ARGS)

# A machine with a GPU may have torch and no network: where there is no environment of ours, PYTHON is used as it is.
NEEDED := import torch, triton, numpy, networkx, sympy
.PHONY: gpu
gpu:
	@test -e $(STAMP) || $(PYTHON) -c '$(NEEDED)' 2>/dev/null || $(MAKE) --no-print-directory install
	@mkdir -p .typings
	@test -e .typings/fusegrad || ln -s .. .typings/fusegrad
	@python=$(BIN)/python; test -e $(STAMP) || python=$(PYTHON); \
		PYTHONPATH=$(CURDIR)/.typings$${PYTHONPATH:+:$$PYTHONPATH} $$python -m fusegrad.benchmarks.gpu_day $(ARGS)

# Read by another checker as well: basedpyright is pyright as a wheel, with the node that it needs.
.PHONY: pyright
pyright: types
	test -x build/pyright/bin/basedpyright || ($(BIN)/python -m venv build/pyright && build/pyright/bin/python -m pip install -q basedpyright)
	build/pyright/bin/basedpyright --pythonpath $(BIN)/python --level error tests/release/typed_functions.py

.PHONY: dist matrix
dist: $(STAMP)
	$(PIP) $(PINS) -e '.[dist]'
	$(BIN)/python tests/release/dist.py

.PHONY: newcomer
newcomer: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/release/newcomer.py $(ARGS)

# CUDA builds of torch take gigabytes under build/matrix.
matrix: $(STAMP)
	$(BIN)/python tests/release/matrix.py $(if $(PAIRS),--pairs "$(PAIRS)") --python $(PYTHON) $(ARGS)

clean:
	rm -rf .venv .typings .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist fusegrad.egg-info fusegrad-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: convergence
convergence: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m fusegrad.examples.models.convergence --steps $(or $(STEPS),200) $(ARGS)

.PHONY: fuzz-graphs
fuzz-graphs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/graphs.py $(or $(N),200) --seed $(or $(SEED),0) --jobs $(JOBS) $(ARGS)

.PHONY: fuzz-habits
fuzz-habits: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/habits.py $(or $(N),200) --seed $(or $(SEED),0) --jobs $(JOBS) $(ARGS)

.PHONY: fuzz-parts
fuzz-parts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/divisions.py $(or $(N),2000) --seed $(or $(SEED),0) --jobs $(JOBS) $(ARGS)

.PHONY: fuzz-streams
fuzz-streams: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/streams/stream_trials.py $(or $(N),200) --seed $(or $(SEED),0) --jobs $(JOBS) $(ARGS)

.PHONY: fuzz-configurations
fuzz-configurations: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/configurations.py $(or $(N),200) --seed $(or $(SEED),0) \
		--jobs $(JOBS) $(ARGS)

# Packages go into an environment of their own, which stands on this one: --no-deps, so that no other torch comes.
WORLD := build/world
WORLD_STAMP := $(WORLD)/.installed
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(WORLD_STAMP): $(STAMP) tests/world/requirements.txt
	$(BIN)/python -m venv $(WORLD)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(WORLD)/bin/python -c '$(SITE)')/below.pth"
	PIP_CONSTRAINT=$(CONSTRAINTS) $(WORLD)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		-r tests/world/requirements.txt
	touch $@

# Parts and packages: ARGS="classes page --only snntorch entmax".
.PHONY: world
world: $(WORLD_STAMP)
	OMP_NUM_THREADS=1 $(WORLD)/bin/python tests/world/world.py $(ARGS)
