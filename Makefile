# One command each; every one of them makes .venv first if it has to.
#   make demo [SEED=3]   train on arithmetic and watch the reward rise
#   make test            the suite, five files at a time
#   make test-all        its long tests and every cell of its tables too, of which make test runs some; with coverage
#   make test-vllm       the policy at vLLM itself, on a CPU; installs it first (3.4 GB), and takes minutes
#   make test-agents     the clients and frameworks of agents themselves, on a CPU; installs them first (0.8 GB)
#   make test-trackers   TensorBoard, W&B, trackio, MLflow and Prometheus, offline; installs them first (0.3 GB)
#   make test-report     the page of penstock report in headless Chromium, which is installed; installs playwright first (170 MB)
#   make test-prime-rl PRIME_RL=../prime-rl   prime-rl's loader and loss, whose checkout is there; installs 0.2 GB first
#   make test-roll ROLL=../roll   ROLL's pipeline on a CPU, whose checkout is there; installs 0.3 GB first
#   make test-atropos ATROPOS=../atropos   with Atropos itself, whose checkout is there; installs 0.5 GB first
#   make test-atropos-verl ATROPOS=../atropos   an environment of Atropos into verl's loss, by one command
#   make test-atropos-skyrl ATROPOS=../atropos SKYRL_PYTHON=python3.12   environments of Atropos and SkyRL's own trainers,
#                        each with an interpreter of its own; installs what test-atropos and test-skyrl install
#   make test-atropos-roll ATROPOS=../atropos ROLL=../roll   environments of Atropos, trained by ROLL's pipeline on a CPU
#   make test-gpu        kernels, weights, training, sampling and runs on a GPU of this machine; eight minutes at most
#   make test-oracles    losses, masks and advantages beside the code of verl, TRL, SkyRL, AReaL and OpenRLHF; installs 50 MB first
#   make test-oracles PRIME_RL=../prime-rl SLIME=../slime ROLL=../roll   and beside that of these, whose checkouts are there
#   make test-trl        TRL's own trainers, on a CPU; installs TRL first (11 MB)
#   make test-skyrl SKYRL_PYTHON=python3.12   SkyRL's own trainers, on a CPU; installs SkyRL and torch first (6 GB), takes minutes
#   make test-ray        stages on clusters of Ray on this machine; installs Ray first (100 MB)
#   make test-verl       verl's own trainer, on a CPU; installs verl, Ray and what they need first (580 MB)
#   make test-plugins PRIME_RL=../prime-rl SLIME=../slime ROLL=../roll ATROPOS=../atropos   agents, trackers, Ray and all of these trainers, one after the
#                        other; those that failed are named at the end
#   make check           formatter, linter, mypy, pyright, types of the public names, import directions
#   make docs            the documentation site, in build/site; a link that leads nowhere is an error
#   make test-dist       sdist and wheel, built, installed and run in empty environments of PYTHONS
#   make chaos [SEED=3 MINUTES=10]   random kills, stops, cuts, flips and floods, with nothing lost, doubled, hung or left over
#   make bench           the benchmarks; results in runs/bench
#   make setup           only the environment
#   make clean           remove what the others made, except runs/

PYTHON ?= python3
SEED ?= 0
MINUTES ?= 10
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OLDER := $(VENV)/transformers-4
VLLM := $(VENV)/vllm
WITH_ATROPOS := $(VENV)/atropos
AGENTS := $(VENV)/agents
VERIFIERS := $(VENV)/verifiers
OPENENV := $(VENV)/openenv
TRACKERS := $(VENV)/trackers
REPORT := $(VENV)/report
TRL := $(VENV)/trl
ORACLES := $(VENV)/oracles
WITH_SKYRL := $(VENV)/skyrl
SKYRL_PYTHON ?= python3.12
VERL := $(VENV)/verl
WITH_PRIME_RL := $(VENV)/prime-rl
WITH_ROLL := $(VENV)/roll
RAY := $(VENV)/ray
DOCS := $(VENV)/docs

# Workers, and tests start many, begin with modules that were compiled before.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu test-vllm test-agents test-trackers test-report test-atropos test-atropos-verl test-atropos-skyrl test-oracles test-trl test-verl test-skyrl test-prime-rl test-ray test-roll test-atropos-roll test-plugins check check-mypy check-pyright docs test-dist chaos bench setup clean

demo: $(READY)
	$(BIN)/python examples/arithmetic_grpo.py --seed $(SEED)

# Five files at a time, in their order: the long ones are not the last. More than the cores, for many tests wait.
BESIDE := -n 5 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(BIN)/python -m pytest $(BESIDE)

test-all: $(READY) $(OLDER)
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(BESIDE) -m "long or not long"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered
	PYTHONPATH=$(OLDER) $(BIN)/python -m pytest tests/pipeline/weights/test_transformers_models.py

# A framework may take minutes to begin.
AGAINST := -m pytest -o faulthandler_timeout=0
# Empty, whatever the environment has, except for the targets that set them.
WARNINGS :=
BELOW :=
OPTIONS :=

# Machines with a GPU are lent for minutes: kernels come first, and the session ends in time.
test-gpu: $(READY)
	$(BIN)/python $(AGAINST) --session-timeout=480 --durations=10 tests/gpu_real/against_*kernels.py \
		tests/gpu_real/against_*.py

test-vllm: $(VLLM)/ready $(AGENTS)/ready
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python $(AGAINST) tests/vllm/against_vllm.py tests/vllm/against_servers.py \
		tests/vllm/against_supports.py
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python PYTHONPATH=$(CURDIR)/$(AGENTS):$(CURDIR) \
		$(BIN)/python $(AGAINST) -W default tests/vllm/against_agents.py

test-trackers: $(TRACKERS)/ready
	PYTHONPATH=$(TRACKERS) $(BIN)/python -m pytest tests/trackers_real/against_trackers.py

test-report: $(READY)
	scripts/check_program.sh $@ chromium
	$(MAKE) $(REPORT)/ready
	PYTHONPATH=$(CURDIR)/$(REPORT):$(CURDIR) $(BIN)/python $(AGAINST) tests/report_real/against_report.py

# Warnings of these packages are no errors. verifiers, openenv and the newest clients exclude one another; the harnesses of
# verifiers find uv on the path.
test-agents: $(AGENTS)/ready $(VERIFIERS)/ready $(OPENENV)/ready
	PYTHONPATH=$(CURDIR)/$(AGENTS):$(CURDIR) $(BIN)/python $(AGAINST) -W default tests/agents_real/against_*.py
	PATH="$(CURDIR)/$(VERIFIERS)/bin:$$PATH" PYTHONPATH=$(CURDIR)/$(VERIFIERS):$(CURDIR) $(BIN)/python $(AGAINST) -W default tests/verifiers_real/against_*.py
	PYTHONPATH=$(CURDIR)/$(OPENENV):$(CURDIR) $(BIN)/python $(AGAINST) -W default tests/openenv_real/against_*.py

# Ray's warnings are no errors. Its processes begin as Python starts them, without the paths of pytest.
test-ray: private WARNINGS := -W default
test-ray: private BELOW := :$(CURDIR)
test-trl test-ray test-verl: test-%: $(VENV)/%/ready
	PYTHONPATH=$(<D) $(BIN)/python scripts/check_extra.py $*
	PYTHONPATH=$(CURDIR)/$(<D)$(BELOW) $(BIN)/python $(AGAINST) $(WARNINGS) tests/$*_real/against_*.py

test-skyrl: $(WITH_SKYRL)/ready
	$(WITH_SKYRL)/bin/python scripts/check_extra.py skyrl
	$(WITH_SKYRL)/bin/python $(AGAINST) tests/skyrl_real/against_skyrl.py

COMMIT_OF_PRIME_RL := 559b44772e471d1538537b8805cc77f3824a5e64
COMMIT_OF_SLIME := 624b824a898ab0ec1fcb4d373004c7f3852bf515
COMMIT_OF_ROLL := 8eb27cc2dc34c4d1310b169d9b86d339004d811a
COMMIT_OF_ATROPOS := 296a0bc55760e43b9c0743c052f8d6c2732606d1

# A recipe looks at the checkouts that it needs before it installs anything.
CHECK = scripts/check_checkout.sh $@
CHECK_PRIME_RL = $(CHECK) PRIME_RL https://github.com/PrimeIntellect-ai/prime-rl $(COMMIT_OF_PRIME_RL) "$(PRIME_RL)"
CHECK_SLIME = $(CHECK) SLIME https://github.com/THUDM/slime $(COMMIT_OF_SLIME) "$(SLIME)"
CHECK_ROLL = $(CHECK) ROLL https://github.com/alibaba/ROLL $(COMMIT_OF_ROLL) "$(ROLL)"
CHECK_ATROPOS = $(CHECK) ATROPOS https://github.com/NousResearch/atropos $(COMMIT_OF_ATROPOS) "$(ATROPOS)"

AT := $(CURDIR)/$(WITH_PRIME_RL):$(CURDIR)/$(TRACKERS):$(abspath $(PRIME_RL))/src:$(abspath $(PRIME_RL))/packages/prime-rl-configs/src

test-prime-rl: $(READY)
	$(CHECK_PRIME_RL)
	$(MAKE) $(WITH_PRIME_RL)/ready $(TRACKERS)/ready
	PYTHONPATH=$(AT) $(BIN)/python $(AGAINST) tests/prime_rl/against_prime_rl.py

# Without one of the checkouts, the tests with it are skipped.
test-oracles: $(ORACLES)/ready
	$(if $(PRIME_RL),$(CHECK_PRIME_RL))
	$(if $(SLIME),$(CHECK_SLIME))
	$(if $(ROLL),$(CHECK_ROLL))
	PRIME_RL="$(PRIME_RL)" SLIME="$(SLIME)" ROLL="$(ROLL)" PYTHONPATH=$(CURDIR)/$(ORACLES) \
		$(BIN)/python $(AGAINST) tests/oracles_real/against_*.py

# ROLL's checkout has a package `tests`, as penstock has: a link to its package `roll` alone is on the path. Its
# warnings, and those of Ray, are no errors.
test-roll: $(READY)
	$(CHECK_ROLL)
	$(MAKE) $(WITH_ROLL)/ready
	ln -sfn $(abspath $(ROLL))/roll $(WITH_ROLL)/roll
	PYTHONPATH=$(CURDIR)/$(WITH_ROLL) $(BIN)/python $(AGAINST) -W default tests/roll_real/against_roll.py

test-atropos: $(READY)
	$(CHECK_ATROPOS)
	$(MAKE) $(WITH_ATROPOS)/ready
	ATROPOS="$(ATROPOS)" $(WITH_ATROPOS)/bin/python $(AGAINST) tests/atropos_real/against_*.py

# Each framework keeps its own packages: the launcher gives each program an interpreter or a path of its own.
test-atropos-verl: $(VERL)/ready
	$(CHECK_ATROPOS)
	$(MAKE) $(WITH_ATROPOS)/ready
	ATROPOS="$(ATROPOS)" $(BIN)/python $(AGAINST) tests/atropos_verl_real/against_*.py

# The environments of Atropos run in its interpreter, with its packages; ROLL in that of .venv.
test-atropos-roll: $(READY)
	$(CHECK_ATROPOS)
	$(CHECK_ROLL)
	$(MAKE) $(WITH_ROLL)/ready $(WITH_ATROPOS)/ready
	ln -sfn $(abspath $(ROLL))/roll $(WITH_ROLL)/roll
	ATROPOS="$(abspath $(ATROPOS))" ATROPOS_PYTHON=$(CURDIR)/$(WITH_ATROPOS)/bin/python PYTHONPATH=$(CURDIR)/$(WITH_ROLL) \
		$(BIN)/python $(AGAINST) -W default tests/atropos_roll_real/against_atropos_roll.py

# SkyRL's interpreter runs the tests, and starts environments with that of Atropos.
test-atropos-skyrl: $(READY)
	$(CHECK_ATROPOS)
	$(MAKE) $(WITH_ATROPOS)/ready $(WITH_SKYRL)/ready
	ATROPOS="$(ATROPOS)" ATROPOS_PYTHON="$(CURDIR)/$(WITH_ATROPOS)/bin/python" \
		$(WITH_SKYRL)/bin/python $(AGAINST) tests/atropos_skyrl_real/against_*.py

# Packages beside those of .venv, in a folder that only the tests with them have on their path. Some wheels have folders
# that are not their own. gem, for ROLL, refuses Python 3.12.1 and later by its metadata alone; of
# SkyRL, which refuses 3.11, the oracles run functions.
$(WITH_ROLL)/ready $(ORACLES)/ready: private OPTIONS := --ignore-requires-python
$(AGENTS)/ready $(VERIFIERS)/ready $(OPENENV)/ready $(TRACKERS)/ready $(REPORT)/ready $(TRL)/ready $(ORACLES)/ready $(RAY)/ready $(VERL)/ready $(WITH_PRIME_RL)/ready $(WITH_ROLL)/ready: $(VENV)/%/ready: scripts/%/requirements.txt | $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps $(OPTIONS) --target $(@D) --requirement $<
	rm -rf $(addprefix $(@D)/,tests scripts recipe tutorial)
	touch $@

# Interpreters of their own.
$(VLLM)/ready: scripts/vllm/vllm.txt
$(VLLM)/ready $(WITH_SKYRL)/ready $(WITH_ATROPOS)/ready: $(VENV)/%/ready: scripts/make_%_venv.sh scripts/%/requirements.txt | $(READY)
	SKYRL_PYTHON="$(SKYRL_PYTHON)" $< $(@D)
	touch $@

# Every week too, each in a job of its own: .github/workflows/weekly.yml.
PLUGINS := test-agents test-trackers test-report test-ray test-oracles test-trl test-verl test-skyrl test-prime-rl test-roll test-atropos test-atropos-verl test-atropos-roll test-atropos-skyrl

test-plugins:
	$(MAKE) --keep-going --jobs=1 $(PLUGINS)

# The last transformers that knows configurations in the old layout alone, beside the newest.
$(OLDER): $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@ transformers==4.57.6 'huggingface-hub<1' 'tokenizers<0.23' \
		requests certifi charset-normalizer idna urllib3

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(MAKE) --no-print-directory --jobs=2 --output-sync check-mypy check-pyright

# Beside each other: they are most of the time.
check-mypy:
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_imports.py

check-pyright:
	$(BIN)/pyright
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes penstock --ignoreexternal

# Each needs gigabytes for torch. PYTHONS are interpreters: make test-dist PYTHONS='python3.11 python3.14'
PYTHONS ?= $(PYTHON)

test-dist:
	scripts/test_dist.sh $(PYTHONS)

# The site's tools have an environment of their own: none of them is needed to use or to test penstock.
docs: $(DOCS)/ready
	$(DOCS)/bin/python scripts/docs/collect_pages.py build/docs
	$(DOCS)/bin/zensical build --clean --strict

$(DOCS)/ready: scripts/docs/requirements.txt | $(READY)
	rm -rf $(DOCS)
	$(BIN)/python -m venv --without-pip $(DOCS)
	$(BIN)/python -m pip --disable-pip-version-check --python $(DOCS)/bin/python install --quiet --no-deps --requirement $<
	touch $@

# Lines between two network namespaces are cut where this runs as root and iproute2 is installed.
chaos: $(READY)
	$(BIN)/python -m chaos --minutes $(MINUTES) --seed $(SEED)

# Ten minutes at most, peers included; those that are not installed are skipped (pip install -e '.[bench]').
BENCH := runs/bench
OURS := penstock iceoryx2-spin

bench: $(READY)
	mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks.transport --seconds 1 --repeats 3 --json $(BENCH)/peers.json --png $(BENCH)/peers.png
	$(BIN)/python -m benchmarks.transport --contestants $(OURS) --group 1 8 16 --producers 1 2 4 --seconds 1 \
		--repeats 1 --json $(BENCH)/cases.json --png $(BENCH)/cases.png
	$(BIN)/python -m benchmarks.transport --contestants $(OURS) --tokens 256 32768 --seconds 1 --repeats 1 \
		--json $(BENCH)/lengths.json --png $(BENCH)/lengths.png
	$(BIN)/python -m benchmarks.latency --seconds 1 --repeats 2 --json $(BENCH)/latency.json
	$(BIN)/python -m benchmarks.cost --seconds 1.5 --repeats 2 --json $(BENCH)/cost.json
	$(BIN)/python -m benchmarks.end_to_end --seconds 2 --repeats 2 --json $(BENCH)/end_to_end.json
	$(BIN)/python -m benchmarks.training --seconds 2 --repeats 1 --json $(BENCH)/training.json
	$(BIN)/python -m benchmarks.atropos --seconds 2 --json $(BENCH)/atropos.json

setup: $(READY)

# The environment is as old as its stamp: it is brought up to date when what it is made from changes.
$(READY): pyproject.toml constraints.txt scripts/make_venv.sh
	PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .cache build dist src/penstock.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
