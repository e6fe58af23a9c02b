# make train         the demo: a small model learns to answer questions about pictures, on any machine; MODEL=qwen3_vl, qwen3_5 or one with _moe, DATA=video, LORA=1
# make test          lint, types, unit tests, functional tests
# make matrix        the rows of long matrices that `make test` leaves out
# make torture       a run that is killed dozens of times, also on two hosts, and must end as if nobody had touched it
# make nccl-rules    590 drawn layouts on a process group with NCCL's rules: all end, with equal losses; some minutes
# make recorded      small runs of every kind, compared to the bit with tests/recorded/recorded.json; three minutes
# make properties    the property tests with other examples than those of `make test`
# make fuzz          bad input of all kinds for 20 minutes: taken, or refused with a sentence
# make slurm         the job scripts on a Slurm of three nodes on this machine; some minutes, as root, Linux
# make release-check  the wheel, in an environment of its own: imports, plans and starts; some minutes, up to 6 GB
# make test-versions six sets of Python, torch, transformers and Megatron-Core; up to 6 GB each
# Each makes what it needs, .venv included. PYTHON=python3.12 make ... takes another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOGS := $(VENV)/logs
EXTRAS := dev,tensorboard,bench,video,parquet
RANKS ?= 2

# A recipe fails where the first command of a pipe does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# One thread per process: the ranks of a run and the workers of the tests share the cores.
export OMP_NUM_THREADS := 1
# Nothing is fetched while programs run.
export HF_HUB_OFFLINE := 1
# Each process would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test matrix lint types unit functional torture nccl-rules recorded properties fuzz slurm release-check
.PHONY: .release test-versions format readme kernels train demo-clean bench bench-gpu clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# ---------------------------------------------------------------------------------------- environment

venv: $(INSTALLED)

# Files are compiled on all cores, where pip takes one. Some are for other versions of Python.
$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-input -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@mkdir -p $(LOGS)
	@touch $@

# ---------------------------------------------------------------------------------------------- tests

# What `make unit` runs; `make functional` runs the rest, in about the same time.
IN_UNIT := tests/unit tests/fake_cuda benchmarks/tests

# Types and both runs of pytest at the same time, since many tests wait; their output is mixed. How each ended comes last.
test: lint
	@$(MAKE) --no-print-directory --keep-going --jobs 3 types unit functional || { tail -n 25 $(LOGS)/*.log; exit 1; }

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/pyright 2>&1 | tee $(LOGS)/types.log

unit: $(INSTALLED)
	$(BIN)/python -u -m pytest $(IN_UNIT) 2>&1 | tee $(LOGS)/unit.log

# Not part of `make test`.
matrix: $(INSTALLED)
	$(BIN)/python -m pytest -m long --ignore tests/rules

functional: $(INSTALLED)
	$(BIN)/python -u -m pytest tests $(IN_UNIT:%=--ignore %) 2>&1 | tee $(LOGS)/functional.log

# Not part of `make test`. SEED=N kills at other moments.
SEED ?= 0
torture: $(INSTALLED)
	$(BIN)/python -m tests.torture --seed $(SEED)
	$(BIN)/python -m tests.torture --seed $(SEED) --async

# Not part of `make test`. ROWS="oldest 0.18" chooses, ALL=1 runs all tests instead of a subset.
ROWS ?=
test-versions:
	$(PYTHON) -m tests.versions --extras $(EXTRAS) $(if $(ALL),--all) $(ROWS)

# Not part of `make test`. SEED=N draws other layouts.
nccl-rules: $(INSTALLED)
	SEED=$(SEED) $(BIN)/python -m pytest -m long tests/rules

# Not part of `make test`. `python -m tests.recorded --help` says how to record anew, and from another checkout.
recorded: $(INSTALLED)
	$(BIN)/python -m tests.recorded --check

# Not part of `make test`. Other examples each time.
properties: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit -m hypothesis --hypothesis-profile=random

# Not part of `make test`. SEED=N draws other cases.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --seed $(SEED)

# Not part of `make test`. Wants Slurm and munge installed, and root; says so where they are missing.
slurm: $(INSTALLED)
	$(BIN)/python -m pytest -m slurm tests/slurm

# Not part of `make test`. Programs are copied, since beside the package Python would find it instead of the wheel.
release-check:
	RELEASE=$$(mktemp -d) && trap 'rm -rf "$$RELEASE"' EXIT && $(MAKE) --no-print-directory .release RELEASE="$$RELEASE"

# Built from a copy: setuptools would write into build/ here. TMPDIR chooses the disk.
IN_RELEASE = cd $(RELEASE)/programs && ../env/bin/python
.release:
	mkdir $(RELEASE)/programs $(RELEASE)/source
	cp -r setup.py pyproject.toml README.md LICENSE megatron_hetero $(RELEASE)/source
	$(PYTHON) -m venv $(RELEASE)/env
	$(RELEASE)/env/bin/python -m pip wheel --disable-pip-version-check --no-input -q --no-deps -w $(RELEASE) $(RELEASE)/source
	$(if $(TORCH_INDEX),$(RELEASE)/env/bin/python -m pip install -q --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(RELEASE)/env/bin/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt $(RELEASE)/*.whl
	cp -r pretrain_vlm.py examples $(RELEASE)/programs
	$(IN_RELEASE) -m pip check
	$(IN_RELEASE) -c 'import sys; from megatron_hetero import *; from megatron_hetero import __file__; assert sys.prefix in __file__'
	$(IN_RELEASE) -m megatron_hetero.run --help >/dev/null
	$(IN_RELEASE) pretrain_vlm.py --plan --world-size 8 --config examples/qwen2_5_vl_7b.yaml \
		--model.hf_path examples/models/qwen2_5_vl_7b

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The table of flags in docs/configuration.md, from the code.
readme: $(INSTALLED)
	$(BIN)/python -m tests.unit.test_readme

# How many kernels a step launches in layouts of large models, after a change that is meant to change that.
kernels: $(INSTALLED)
	$(BIN)/python -m tests.fake_cuda

# --------------------------------------------------------------------------------------------- programs

# MODEL and DATA choose a folder of their own; `make demo-clean MODEL=qwen3_vl` removes that. LORA=1: adapters teach the
# trained model other names of colours, in a folder beside its own.
MODEL ?=
DATA ?=
LORA ?=
DEMO := demo$(addprefix -,$(MODEL))$(addprefix -,$(DATA))
RUN = $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) pretrain_vlm.py --config
ANSWER = OMP_NUM_THREADS=$(RANKS) $(BIN)/python -m examples.answer_questions
HELD_OUT = --images $(1)/data/images --annotations $(1)/data/heldout.jsonl
ADAPTED := $(DEMO)-lora

ifeq ($(LORA),)
train: $(DEMO)/demo.json
	$(RUN) $(DEMO)/config.yaml
	$(ANSWER) $(DEMO)/trained $(call HELD_OUT,$(DEMO))
	$(ANSWER) $(DEMO)/trained $(call HELD_OUT,$(DEMO)) --blank
	$(if $(filter video,$(DATA)),$(ANSWER) $(DEMO)/trained --images $(DEMO)/data/images --annotations $(DEMO)/data/reversed.jsonl)
else
# The trained model alone, with adapters, and with these merged, by plain transformers.
train: $(ADAPTED)/demo.json
	$(RUN) $(ADAPTED)/config.yaml
	rm -rf $(ADAPTED)/merged
	$(BIN)/python -m megatron_hetero.cli.adapters merge $(DEMO)/trained $(ADAPTED)/adapter $(ADAPTED)/merged
	$(ANSWER) $(DEMO)/trained $(call HELD_OUT,$(ADAPTED))
	$(ANSWER) $(DEMO)/trained --adapter $(ADAPTED)/adapter $(call HELD_OUT,$(ADAPTED))
	$(ANSWER) $(ADAPTED)/merged $(call HELD_OUT,$(ADAPTED))
	$(ANSWER) $(ADAPTED)/merged $(call HELD_OUT,$(ADAPTED)) --blank
endif

$(DEMO)/demo.json: | $(INSTALLED)
	$(BIN)/python -m examples.make_demo $(DEMO) $(addprefix --model ,$(MODEL)) $(addprefix --data ,$(DATA))

$(DEMO)/trained: | $(DEMO)/demo.json
	$(RUN) $(DEMO)/config.yaml

$(ADAPTED)/demo.json: | $(DEMO)/trained
	$(BIN)/python -m examples.make_demo $(ADAPTED) --adapt $(DEMO)/trained $(addprefix --model ,$(MODEL)) $(addprefix --data ,$(DATA))

demo-clean:
	rm -rf $(DEMO) $(ADAPTED)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.lora
	$(BIN)/python -m benchmarks.boundary
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.schedule
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.delta_rule
	$(BIN)/python -m benchmarks.video
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.roofline

# On a machine with one GPU, in under ten minutes.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu

clean: demo-clean
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
